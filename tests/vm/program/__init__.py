"""Tests of tpcompile/vm/program, file by file."""
