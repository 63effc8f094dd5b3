"""Tests of tpcompile/vm/proof."""
