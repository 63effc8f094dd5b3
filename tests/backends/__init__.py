"""Tests of tpcompile/backends, file by file."""
