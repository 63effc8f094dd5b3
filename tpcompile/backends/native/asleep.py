"""Torch's threads, asleep while a caller waits for a launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TypeVar

from tpcompile.backends.native.build import library

T = TypeVar("T")
_WAIT = ctypes.CFUNCTYPE(None)


def asleep(wait: Callable[[], T]) -> T:
    """Call `wait` while torch's other threads sleep; return its result or raise its error.

    They would spin for some milliseconds after the last operation, on the cores of the workers.
    """
    found: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            found.append(wait())
        except BaseException as error:
            errors.append(error)

    library().tpc_asleep(_WAIT(call))
    if not found:
        # Python may raise KeyboardInterrupt in `call` before its first line.
        raise errors[0] if errors else KeyboardInterrupt
    return found[0]
