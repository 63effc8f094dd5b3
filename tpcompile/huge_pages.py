"""Memory in huge pages: in small ones, looking up addresses limits how fast a CPU reads."""

from __future__ import annotations

import mmap


def zeros(size: int) -> mmap.mmap:
    """Return private memory that is zero, in huge pages if the system has them."""
    # Shared memory, mmap's default, would not be in huge pages.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel built without them
            return memory
    return memory
