"""Pausing Python's garbage collector while many small objects are made that all stay."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Graphs of deep models are tens of thousands of nodes, none of which is garbage.

    Full collections would walk them, and all of torch and transformers, again and again: half of
    the time that the passes of an 80-layer model take. Whoever finds the collector on turns it
    on again, so uses may be nested.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
