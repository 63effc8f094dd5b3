"""Tests of tpcompile/runtime, file by file."""
