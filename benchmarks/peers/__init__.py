"""The sides of a comparison, each in processes of its own: tpcompile and its peers."""
