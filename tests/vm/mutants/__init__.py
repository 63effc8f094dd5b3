"""Programs that lowering makes, each with one mistake of a careless scheduler."""
