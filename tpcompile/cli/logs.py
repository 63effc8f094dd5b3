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
    level = _LEVELS[min(verbosity, len(_LEVELS) - 1)]
    with _written("tpcompile", level, "%(name)s: %(message)s"):
        yield


@contextmanager
def logged_requests(verbosity: int) -> Iterator[None]:
    """Write a line to stderr for each request of a server, and for each restart of its ranks.

    With a verbosity, `logged` writes them. On a terminal, a line replaces that of the state.
    """
    if verbosity:
        yield
        return
    start = "\r\x1b[K" if sys.stderr.isatty() else ""
    with _written("tpcompile.serving", logging.INFO, start + "%(asctime)s %(message)s"):
        yield


@contextmanager
def _written(name: str, level: int, form: str) -> Iterator[None]:
    logger, handler = logging.getLogger(name), _ToStderr()
    handler.setFormatter(logging.Formatter(form))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
