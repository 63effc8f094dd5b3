"""Tests of tpcompile/vm/schedule."""
