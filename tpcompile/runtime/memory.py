"""Settings of the memory allocator while weights are loaded."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_MMAP_THRESHOLD = -3
"""glibc's `M_MMAP_THRESHOLD`: larger allocations return to the system when they are freed."""
_TRIM_THRESHOLD = -1
"""glibc's `M_TRIM_THRESHOLD`: free memory beyond it at the top of the heap returns to the system,
and has to be allocated again."""
_WHILE_LOADING = 1 << 20
_AFTERWARDS = 32 << 20
"""The maximum that glibc itself would choose: new pages for every value would cost time."""


@contextmanager
def returned_at_once() -> Iterator[None]:
    """Return large freed tensors to the system at once within the context.

    Each weight is read, and then copied into its layout. Without this, the freed originals left
    holes in the heap that added up to a tenth of all weights. Only glibc is configured; other
    allocators keep their settings.
    """
    tell = getattr(ctypes.CDLL(None), "mallopt", None)
    if tell is None:
        yield
        return
    tell(_MMAP_THRESHOLD, _WHILE_LOADING)
    try:
        yield
    finally:
        tell(_MMAP_THRESHOLD, _AFTERWARDS)
        tell(_TRIM_THRESHOLD, 2 * _AFTERWARDS)  # glibc adapts neither once one is set
