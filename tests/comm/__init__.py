"""Tests of tpcompile/comm, file by file."""
