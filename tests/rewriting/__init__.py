"""Tests of tpcompile/rewriting, file by file."""
