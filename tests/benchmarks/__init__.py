"""Tests of the benchmarks: that they can fail, and what their command line says."""
