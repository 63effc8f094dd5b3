"""Tests of tpcompile/passes."""
