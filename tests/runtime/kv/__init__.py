"""Tests of tpcompile/runtime/kv, file by file."""
