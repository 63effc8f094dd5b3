"""Tests of the native executor: accuracy, reproducibility, threads and the build."""
