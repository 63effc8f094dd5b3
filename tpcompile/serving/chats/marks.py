"""The marks that Qwen models write around thinking and calls."""

THINK, END_OF_THINK = "<think>", "</think>"
TOOL_CALL, END_OF_TOOL_CALL = "<tool_call>", "</tool_call>"
