"""Looking at graphs: dumps, differences, plans."""
