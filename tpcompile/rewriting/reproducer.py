"""Reproducers: the graph before a pass that failed, with the passes that were left, as text.

`tpcompile opt FILE` runs the passes again, and `tpcompile reduce FILE` shrinks the graph.
"""

from __future__ import annotations

import platform
import re
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from tpcompile.errors import CompileError, ShardingError, UnsupportedError, UsageError

OnFailure = Callable[[str], str]
"""Callback that receives a reproducer, and returns a sentence for the error."""

_PACKAGES = ("tpcompile", "torch", "transformers")
_PIPELINE = re.compile(r"^# pipeline: (.*)$", re.MULTILINE)
_SHOWN = 300
"""The maximum number of characters of the error."""


def is_worth_reproducing(error: Exception) -> bool:
    """Return whether an error may be a mistake of a pass, and is not a refusal of the input."""
    return not isinstance(error, UsageError | ShardingError | UnsupportedError)


def reproducer_of(graph: str, pipeline: str, error: Exception) -> str:
    """Return a reproducer: comments with the pipeline, and the text of the graph before it."""
    kind = "" if isinstance(error, CompileError) else f"{type(error).__name__}: "
    message = " ".join(f"{kind}{error}".split())
    shown = message if len(message) <= _SHOWN else message[:_SHOWN] + "…"
    listed = ", ".join(f"{name} {number}" for name, number in versions().items())
    return (
        "# `tpcompile opt FILE` shows the error again, `tpcompile reduce FILE` shrinks the graph.\n"
        f"# error: {shown}\n# versions: {listed}\n{with_pipeline(graph, pipeline)}"
    )


def pipeline_of(text: str) -> str | None:
    """Return the pipeline of a reproducer, or None for other text."""
    header = re.split(r"^graph ", text, maxsplit=1, flags=re.MULTILINE)[0]
    match = _PIPELINE.search(header)
    return match.group(1).strip() if match else None


def with_pipeline(graph: str, pipeline: str) -> str:
    """Return the text of a graph after a comment with the pipeline to run on it, if any."""
    return f"# pipeline: {pipeline}\n{graph}" if pipeline else graph


def versions() -> dict[str, str]:
    """Return the versions of the packages that a compilation depends on, and of Python."""
    numbers = {}
    for name in _PACKAGES:
        try:
            numbers[name] = version(name)
        except PackageNotFoundError:
            numbers[name] = "without metadata"
    return {**numbers, "Python": platform.python_version()}


def write_reproducer(text: str) -> str:
    """Write a reproducer to a temporary file, and return a sentence that says how to run it."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="tpcompile-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write(text)
    except OSError as error:
        return f"A reproducer cannot be written: {error}."
    return f"To reproduce: `tpcompile opt {file.name}`."
