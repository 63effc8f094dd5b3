"""Torch's threads sleep while a caller waits for a launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from tpcompile.backends.native.build import library

T = TypeVar("T")
_WAIT = ctypes.CFUNCTYPE(None)


def asleep(wait: Callable[[], T]) -> T:
    """Call `wait` while torch's other threads sleep; return its result or raise its error.

    They would spin for some milliseconds after the last operation, on the cores of the workers.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> Iterator[None]:
        """Pause inside `try`: Python may raise KeyboardInterrupt as soon as a function starts."""
        try:
            yield
            results.append(wait())
        except BaseException as error:
            errors.append(error)

    calls = call()
    next(calls)
    library().tpc_asleep(_WAIT(partial(next, calls, None)))
    if errors:
        raise errors[0]
    return results[0]
