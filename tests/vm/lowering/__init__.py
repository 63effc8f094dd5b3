"""Tests of tpcompile/vm/lowering, file by file."""
