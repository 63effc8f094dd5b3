"""The parts of `gpu_decode`: sides, limits, checks of numbers, and the report."""
