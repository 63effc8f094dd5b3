"""Tests of tpcompile and its benchmarks; the directories mirror the package."""
