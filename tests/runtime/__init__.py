"""Tests of tpcompile/runtime."""
