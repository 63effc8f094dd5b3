"""Lowered programs, each with one typical scheduling mistake."""
