"""The text of assistants: thinking and tool calls, in the forms that models write."""
