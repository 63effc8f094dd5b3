"""Tests of tpcompile/runtime/kv."""
