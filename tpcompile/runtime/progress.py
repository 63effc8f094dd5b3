"""A bar on a terminal while weights are read; nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Loaded = Callable[[int, int], None]


@contextmanager
def loading_bar(shown: bool = True) -> Iterator[Loaded]:
    """Yields what is to be told how many parameters are there, and of how many."""
    if not shown or sys.stderr is None or not sys.stderr.isatty():
        yield lambda done, of: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("loading weights", total=None)
        yield lambda done, of: progress.update(task, completed=done, total=of)
