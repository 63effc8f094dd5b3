"""The sides of a comparison, tpcompile and its peers, each in its own processes."""
