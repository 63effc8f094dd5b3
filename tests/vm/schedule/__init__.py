"""Tests of tpcompile/vm/schedule, file by file."""
