"""The parts of the `contention` benchmark: conditions, what causes them, pairs, and figures."""
