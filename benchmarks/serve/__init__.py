"""The parts of the `serving` benchmark: traces, prices, simulated and measured runs."""
