"""Tests of the instructions: completeness and results."""
