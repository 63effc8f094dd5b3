"""What is measured and counted: `python -m benchmarks NAME`."""
