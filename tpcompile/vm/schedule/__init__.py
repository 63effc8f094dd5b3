"""Scheduling policies, a simulated clock, and the assembly of lowered steps into programs."""
