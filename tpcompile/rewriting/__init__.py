"""The machinery of passes: patterns, rewriting, structure, running and checking."""
