"""Tests of tpcompile/inspect."""
