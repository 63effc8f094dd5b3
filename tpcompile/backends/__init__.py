"""Backends: torch modules for ranks, and executors for programs."""
