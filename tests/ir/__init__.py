"""Tests of tpcompile/ir, file by file."""
