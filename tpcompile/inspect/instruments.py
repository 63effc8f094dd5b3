"""Instruments: what can be hung on the pass manager to see the graph after every pass."""

from __future__ import annotations

import difflib
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import fx

Render = Callable[[fx.GraphModule], str]
"""How a graph is shown: as text, as JSON, as a picture."""


class Stats(Protocol):
    """What the pass manager says of a pass."""

    @property
    def ms(self) -> float: ...
    @property
    def check_ms(self) -> float: ...
    @property
    def matches(self) -> int: ...
    @property
    def nodes_before(self) -> int: ...
    @property
    def nodes_after(self) -> int: ...


@dataclass
class KeepStages:
    """Keeps every stage as it is shown: (name, text), in order."""

    render: Render
    stages: list[tuple[str, str]] = field(default_factory=list)

    def __call__(self, name: str, gm: fx.GraphModule, stats: Stats) -> None:
        self.stages.append((name, self.render(gm)))


@dataclass
class PrintAfter:
    """Writes the graph after the passes named, or after every one, under a line that says which."""

    render: Render
    write: Callable[[str], object]
    names: frozenset[str] | None = None

    def __call__(self, name: str, gm: fx.GraphModule, stats: Stats) -> None:
        if self.names is None or name in self.names:
            self.write(f"# after {name}: {summary(stats)}\n{self.render(gm)}\n")


@dataclass
class PrintDiff:
    """Writes what a pass changed, as a unified diff of the text before and after it."""

    render: Render
    write: Callable[[str], object]
    names: frozenset[str] | None = None
    _last: tuple[str, str] | None = None

    def __call__(self, name: str, gm: fx.GraphModule, stats: Stats) -> None:
        text = self.render(gm)
        last, self._last = self._last, (name, text)
        if last is not None and (self.names is None or name in self.names):
            changes = difflib.unified_diff(
                last[1].splitlines(keepends=True),
                text.splitlines(keepends=True),
                f"after {last[0]}",
                f"after {name}",
            )
            shown = "".join(changes) or "# no change\n"
            self.write(f"# {name}: {summary(stats)}\n{shown}\n")


def summary(stats: Stats) -> str:
    """What a pass did, without times: the same on every run."""
    matches = "1 match" if stats.matches == 1 else f"{stats.matches} matches"
    if not stats.nodes_before:
        return f"{stats.nodes_after} nodes"
    return f"{matches}, {stats.nodes_before} → {stats.nodes_after} nodes"


@dataclass(frozen=True)
class PassRow:
    """One pass in a log. What is not known of a pass that failed is None."""

    name: str
    ms: float | None
    check_ms: float | None
    matches: int | None
    nodes_before: int
    nodes_after: int | None
    ok: bool

    def to_json(self) -> dict[str, Any]:
        rounded = {
            key: None if value is None else round(value, 3)
            for key, value in (("ms", self.ms), ("check_ms", self.check_ms))
        }
        return {
            "name": self.name,
            **rounded,
            "matches": self.matches,
            "nodes_before": self.nodes_before,
            "nodes_after": self.nodes_after,
            "ok": self.ok,
        }


@dataclass
class PassLog:
    """Keeps what each pass cost and did; the captured graph is not a pass."""

    rows: list[PassRow] = field(default_factory=list)
    nodes: int = 0
    """How many the graph had when it was last seen."""

    def __call__(self, name: str, gm: fx.GraphModule, stats: Stats) -> None:
        self.nodes = stats.nodes_after
        if stats.nodes_before:
            counts = (stats.matches, stats.nodes_before, stats.nodes_after)
            self.rows.append(PassRow(name, stats.ms, stats.check_ms, *counts, ok=True))

    def failed(self, name: str) -> None:
        """The pass that no instrument was called for, as it left an invalid graph."""
        self.rows.append(PassRow(name, None, None, None, self.nodes, None, ok=False))

    def table(self, verdict: bool = False) -> str:
        """A row a pass; with its verdict if asked for."""
        from rich.console import Console
        from rich.table import Table

        table = Table()
        table.add_column("pass")
        for column in ("matches", "nodes", "change", "ms", "check ms"):
            table.add_column(column, justify="right")
        if verdict:
            table.add_column("graph")
        for row in self.rows:
            table.add_row(*_cells(row), *(["valid" if row.ok else "INVALID"] if verdict else []))
        text = io.StringIO()
        Console(file=text, width=80).print(table)
        return text.getvalue()


def _cells(row: PassRow) -> tuple[str, ...]:
    if row.nodes_after is None or row.ms is None or row.check_ms is None:
        return (row.name, "", str(row.nodes_before), "", "", "")
    change = row.nodes_after - row.nodes_before
    return (
        row.name,
        str(row.matches),
        str(row.nodes_after),
        f"{change:+d}" if change else "",
        f"{row.ms:.1f}",
        f"{row.check_ms:.1f}",
    )
