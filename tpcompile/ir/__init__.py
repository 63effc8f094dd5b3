"""What a graph is: ops, types, recipes, the checker, the text form and the simulated ranks."""
