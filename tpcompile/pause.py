"""Pausing Python's garbage collector while many long-lived objects are created."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Disable the garbage collector inside the block.

    Graphs of deep models have tens of thousands of nodes, none of which is garbage. Full
    collections would walk them, and all of torch and transformers, again and again, which is half
    of the time that the passes of an 80-layer model take. The collector is enabled again only if
    it was enabled on entry, so blocks may be nested.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
