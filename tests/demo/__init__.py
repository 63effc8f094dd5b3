"""Tests of tpcompile/demo."""
