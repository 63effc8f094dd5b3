"""Tests of tpcompile/comm."""
