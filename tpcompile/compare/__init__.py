"""Hugging Face eager, graphs and programs side by side, and where they differ first."""
