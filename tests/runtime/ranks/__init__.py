"""Tests of ranks in this process, in workers, and in process groups."""
