"""The ranks of a model: in this process, in workers, or in the process group of a launcher."""
