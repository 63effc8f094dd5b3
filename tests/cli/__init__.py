"""Tests of tpcompile/cli, file by file."""
