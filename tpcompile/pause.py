"""Pausing Python's garbage collector while many long-lived objects are created."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Disable the garbage collector inside the block.

    Graphs of deep models have tens of thousands of live nodes. Full collections would traverse
    them, and all objects of torch and transformers, again and again. This would take half of the
    pass time of an 80-layer model. The collector is enabled again only if it was enabled on entry,
    so blocks may be nested.

    What the block created stays young: an abandoned model, which is part of reference cycles, is
    freed with its weights by the next collection.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
