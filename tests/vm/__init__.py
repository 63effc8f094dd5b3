"""Tests of tpcompile/vm, file by file."""
