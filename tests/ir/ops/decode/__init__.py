"""The ops: each rule against the op itself, on simulated ranks."""
