"""What must be done before what, counters for it, and the proof that a program keeps it."""
