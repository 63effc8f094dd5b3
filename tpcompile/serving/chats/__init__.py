"""The text of assistants: thinking, and calls of tools, as models write them."""
