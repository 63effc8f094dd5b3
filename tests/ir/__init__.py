"""Tests of tpcompile/ir."""
