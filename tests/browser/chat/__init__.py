"""Tests of the chat page in a browser."""
