"""Tests of `tpcompile/serving/chats/`."""
