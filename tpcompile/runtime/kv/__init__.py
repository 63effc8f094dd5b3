"""The KV cache: its blocks, the sequences in it, and how a call is packed onto it."""
