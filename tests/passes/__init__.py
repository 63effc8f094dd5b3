"""Tests of tpcompile/passes, file by file."""
