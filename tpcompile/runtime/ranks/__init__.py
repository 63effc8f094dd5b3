"""The ranks of a model: in this process, in workers of its own, or in the group of a launcher."""
