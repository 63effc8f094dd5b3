"""Tests that need a GPU."""
