"""The graph IR: ops, types, recipes, the checker, the text form and the simulated ranks."""
