"""Tests of tpcompile/inspect/explorer."""
