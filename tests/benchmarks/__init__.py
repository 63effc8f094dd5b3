"""Tests of the benchmarks: failures are reported, and the command line is correct."""
