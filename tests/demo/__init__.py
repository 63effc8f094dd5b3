"""Tests of tpcompile/demo, file by file."""
