"""Benchmarks of time, memory and mistake detection: `python -m benchmarks NAME`."""
