"""Tests of tpcompile/frontend."""
