"""Who runs what: policies, a simulated clock, and programs made of lowered steps."""
