"""Infrastructure for passes: patterns, rewriting, structure, and the pass manager."""
