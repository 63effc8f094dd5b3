"""Tests of tpcompile/frontend, file by file."""
