"""Tests of tpcompile/inspect, file by file."""
