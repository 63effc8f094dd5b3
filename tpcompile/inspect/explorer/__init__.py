"""The explorer: everything about a compilation as one page that opens from disk."""
