"""Many requests at once: the scheduler, its blocks, sampling and the engine."""
