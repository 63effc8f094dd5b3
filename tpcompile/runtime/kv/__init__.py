"""The KV cache: its blocks, its sequences, and packing of batches into tokens."""
