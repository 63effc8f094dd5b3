"""Dependencies between instructions, the counters that enforce them, and the program verifier."""
