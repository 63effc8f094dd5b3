"""The native executor: its numbers, its bits, its threads and how it is built."""
