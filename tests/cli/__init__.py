"""Tests of tpcompile/cli."""
