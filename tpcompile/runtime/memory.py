"""How memory is asked for while weights are made."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_MMAP_THRESHOLD = -3
"""glibc's `M_MMAP_THRESHOLD`: larger pieces of memory go back to the system when they are freed."""
_TRIM_THRESHOLD = -1
"""glibc's `M_TRIM_THRESHOLD`: free memory at the end of the heap beyond it goes back, and has to
be asked for again."""
_WHILE_LOADING = 1 << 20
_AFTERWARDS = 32 << 20
"""The most that glibc itself would choose: fresh pages for every value would cost time."""


@contextmanager
def returned_at_once() -> Iterator[None]:
    """Inside, a large tensor that is freed leaves no hole behind.

    A weight is read, and laid out anew; the holes of what was read took a tenth of all weights.
    Only glibc is told; others are left to do as they do.
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
        tell(_TRIM_THRESHOLD, 2 * _AFTERWARDS)  # glibc's own rule ends when the other is set
