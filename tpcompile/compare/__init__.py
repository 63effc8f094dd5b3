"""Comparisons of Hugging Face eager, graphs and programs, and their first divergence."""
