"""The log on stderr that `-v` turns on. The library itself configures no handlers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tpcompile.cli.command import printable

_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


class _ToStderr(logging.Handler):
    """A handler that writes to the current stderr, which a progress bar may replace."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(printable(self.format(record) + "\n", sys.stderr))


@contextmanager
def logged(verbosity: int) -> Iterator[None]:
    """Write the log of tpcompile to stderr: passes and programs (1), and steps too (2)."""
    if not verbosity:
        yield
        return
    root, handler = logging.getLogger("tpcompile"), _ToStderr()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    level = root.level
    root.addHandler(handler)
    root.setLevel(_LEVELS[min(verbosity, len(_LEVELS) - 1)])
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
