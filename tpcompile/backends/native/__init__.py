"""The native executor: threads of a C++ library that is built on first use."""

from tpcompile.backends.native.executor import Native

__all__ = ["Native"]
