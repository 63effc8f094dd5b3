"""Tests of tpcompile/vm/lowering."""
