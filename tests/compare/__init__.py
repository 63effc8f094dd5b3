"""Tests of tpcompile/compare, file by file."""
