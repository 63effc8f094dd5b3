"""What each instruction has, and what it computes."""
