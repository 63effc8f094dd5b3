"""Tests of the reference machine."""
