"""Weights, ranks and the model that users call."""
