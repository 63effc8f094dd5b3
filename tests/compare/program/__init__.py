"""Tests of programs beside eager and the torch module."""
