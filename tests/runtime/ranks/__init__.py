"""Tests of the ranks: in this process, in workers, in groups."""
