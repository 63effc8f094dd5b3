"""Tests of the parts of the contention benchmark."""
