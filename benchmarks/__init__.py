"""Measurements of time, memory and noticed mistakes: `python -m benchmarks NAME`."""
