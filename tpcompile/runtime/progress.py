"""A progress bar for loading weights, shown only on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Loaded = Callable[[int, int], None]


@contextmanager
def loading_bar(shown: bool = True) -> Iterator[Loaded]:
    """Yield a callback that takes the number of loaded parameters and their total."""
    if not shown or sys.stderr is None or not sys.stderr.isatty():
        yield lambda done, of: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("loading weights", total=None)
        yield lambda done, of: progress.update(task, completed=done, total=of)
