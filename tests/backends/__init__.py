"""Tests of tpcompile/backends."""
