"""Tests of tpcompile/compare."""
