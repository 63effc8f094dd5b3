"""The Triton executor: a program as one persistent kernel."""

from tpcompile.backends.triton.executor import Triton

__all__ = ["Triton"]
