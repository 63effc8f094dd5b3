"""Tests of the sides of a comparison."""
