"""Tests of tpcompile/vm/program."""
