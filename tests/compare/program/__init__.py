"""Tests that compare programs with eager and with the torch module."""
