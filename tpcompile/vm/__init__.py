"""The program of a decode step: instructions over buffers, in queues, ordered by counters."""
