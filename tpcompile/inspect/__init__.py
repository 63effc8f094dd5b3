"""Views of graphs and schedules: dumps, diffs, plans and pictures."""
