"""Tests of tpcompile/vm/proof, file by file."""
