"""Tests of the Triton kernel, in the interpreter and compiled ahead of time."""
