"""A progress bar for loading weights, shown only on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Loaded = Callable[[int, int], None]
"""Callback that takes the number of loaded parameters and their total."""


class LoadCounter:
    """A counter that reports its value and the total to a callback."""

    def __init__(self, loaded: Loaded, total: int) -> None:
        self._loaded, self._total, self._count = loaded, total, 0

    def add(self) -> None:
        self._count += 1
        self._loaded(self._count, self._total)


@contextmanager
def loading_bar(shown: bool = True) -> Iterator[Loaded]:
    """Yield a callback that draws the bar."""
    if not shown or sys.stderr is None or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("loading weights", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
