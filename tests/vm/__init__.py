"""Tests of tpcompile/vm."""
