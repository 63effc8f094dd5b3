"""Tests of tpcompile/rewriting."""
