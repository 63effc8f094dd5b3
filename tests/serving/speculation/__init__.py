"""Tests of speculation."""
