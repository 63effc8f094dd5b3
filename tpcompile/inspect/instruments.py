"""Instruments: callbacks of the pass manager that receive the graph after every pass."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from torch import fx

from tpcompile.inspect.tables import table_text

Render = Callable[[fx.GraphModule], str]
"""A function that formats a graph, for example as text, JSON or Graphviz."""


class Stats(Protocol):
    """The statistics that the pass manager reports for a pass."""

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
    @property
    def nearest(self) -> str: ...
    @property
    def proof_ms(self) -> float: ...
    @property
    def unproved(self) -> str: ...


@dataclass
class KeepStages:
    """An instrument that stores the named stages, or all, as (name, formatted graph) in order."""

    render: Render
    names: frozenset[str] | None = None
    stages: list[tuple[str, str]] = field(default_factory=list)

    def __call__(self, name: str, gm: fx.GraphModule, stats: Stats) -> None:
        if self.names is None or name in self.names:
            self.stages.append((name, self.render(gm)))


@dataclass
class PrintAfter:
    """An instrument that writes a header line and the graph after the named passes, or all."""

    render: Render
    write: Callable[[str], object]
    names: frozenset[str] | None = None

    def __call__(self, name: str, gm: fx.GraphModule, stats: Stats) -> None:
        if self.names is None or name in self.names:
            self.write(f"# after {name}: {summary(stats)}\n{self.render(gm)}")


@dataclass
class PrintDiff:
    """An instrument that writes the effect of each pass as a unified diff of the graph text."""

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
            shown = "".join(changes) or "no change\n"
            self.write(f"# {name}: {summary(stats)}\n{shown}")


def summary(stats: Stats) -> str:
    """Summarise a pass without times, so that the text is the same on every run."""
    matches = "1 match" if stats.matches == 1 else f"{stats.matches} matches"
    if not stats.nodes_before:
        return f"{stats.nodes_after} nodes"
    missed = f"; nearest: {stats.nearest}" if stats.nearest and not stats.matches else ""
    return f"{matches}, {stats.nodes_before} → {stats.nodes_after} nodes{missed}"


@dataclass(frozen=True)
class PassRow:
    """A log entry of a pass: its time, and whether the graph was valid after it."""

    name: str
    ms: float
    check_ms: float
    matches: int
    nodes_before: int
    nodes_after: int
    ok: bool
    proof_ms: float = 0.0
    unproved: str = ""
    """The reason why the values are not proved equal to those before the pass; "" if they are."""

    def to_json(self) -> dict[str, Any]:
        times = {name: round(getattr(self, name), 3) for name in ("ms", "check_ms", "proof_ms")}
        return {**asdict(self), **times}


@dataclass
class PassLog:
    """An instrument that records the times and effects of passes, but not of the capture."""

    rows: list[PassRow] = field(default_factory=list)

    def __call__(self, name: str, gm: fx.GraphModule, stats: Stats) -> None:
        if stats.nodes_before:
            self._add(name, stats, ok=True)

    def failed(self, name: str, stats: Stats) -> None:
        """Record a pass that left an invalid graph; the manager calls no instrument for it."""
        self._add(name, stats, ok=False)

    def _add(self, name: str, stats: Stats, ok: bool) -> None:
        counts = (stats.matches, stats.nodes_before, stats.nodes_after)
        proof = stats.proof_ms, stats.unproved
        self.rows.append(PassRow(name, stats.ms, stats.check_ms, *counts, ok, *proof))

    @property
    def unproved(self) -> dict[str, str]:
        """The reason for each pass whose values are not proved."""
        return {row.name: row.unproved for row in self.rows if row.unproved}

    def table(self, verdict: bool = False) -> str:
        """Format one row per pass, with its verdict if `verdict` is set."""
        from rich.table import Table

        table = Table()
        table.add_column("pass")
        for column in ("matches", "nodes", "change", "ms", "check ms"):
            table.add_column(column, justify="right")
        if verdict:
            table.add_column("graph")
        for row in self.rows:
            table.add_row(*_cells(row), *([_verdict(row)] if verdict else []))
        return table_text(table)


def _verdict(row: PassRow) -> str:
    """Return whether the graph is valid, and its values are proved equal to those before."""
    if not row.ok:
        return "INVALID"
    return "valid" if row.unproved else "proved"


def _cells(row: PassRow) -> tuple[str, ...]:
    change = row.nodes_after - row.nodes_before
    return (
        row.name,
        str(row.matches),
        str(row.nodes_after),
        f"{change:+d}" if change else "",
        f"{row.ms:.1f}",
        f"{row.check_ms + row.proof_ms:.1f}",
    )
