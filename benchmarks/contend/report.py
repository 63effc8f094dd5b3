"""The table of `python -m benchmarks contention`."""

from __future__ import annotations

from itertools import groupby
from statistics import median

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks.contend.conditions import BY_NAME, SIDES
from benchmarks.contend.figures import AGREEMENT, Measured, Series, Target

_COLUMNS = ("alone, ms", "ms", "×", "limit", "90 %", "limit", "pairs", "")


def show(measured: Measured, console: Console) -> None:
    """Print the table and everything that explains it, in 100 columns."""
    console.print(_table(measured))
    console.print(
        "launches, tokens: launches of many tokens, and of one token. ms: the median of a step,\n"
        "with a quota the mean; of two processes the slower one. ×: relative to alone. 90 %: the\n"
        "90th percentile of the steps in the condition, relative to their median. Figures are\n"
        "medians of the pairs that count."
    )
    _show_read(measured, console)
    for name, why in measured.impossible.items():
        console.print(f"{BY_NAME[name].title}: not possible here: {why}", markup=False)
    for names, problem in (
        (measured.missing, "failed"),
        (measured.not_installed, "is not installed"),
    ):
        for name, why in names.items():
            console.print(f"{name} {problem}: {why}", markup=False)
    for side, (gap, allowed) in measured.gaps.items():
        verdict = "right" if measured.right(side) else "WRONG"
        console.print(f"{side}: tokens {verdict}; largest gap {gap:.4f}, allowed {allowed:.4f}")
    targets = measured.targets()
    missed = sum(not target.ok for target in targets)
    console.print(f"{len(targets) - missed} of {len(targets)} limits met, {missed} MISSED")


def _show_read(measured: Measured, console: Console) -> None:
    dropped = sum(series.dropped for series in measured.series)
    every = sum(len(series.pairs) for series in measured.series)
    console.print(
        f"{dropped} of {every} pairs dropped: the read loop before and after them differed by more "
        f"than {AGREEMENT - 1:.0%}"
    )
    if readings := measured.bandwidths:
        console.print(
            f"read loop, GB/s: median {median(readings) / 1e9:.1f}, from {min(readings) / 1e9:.1f} "
            f"to {max(readings) / 1e9:.1f}"
        )


def _table(measured: Measured) -> Table:
    title = f"{measured.model}, {measured.cores} cores, {measured.cpu}"
    table = Table(title=title, box=SIMPLE, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    targets = {(t.side, t.condition, t.what): t for t in measured.targets()}
    conditions = list(BY_NAME)
    series = sorted(
        measured.series, key=lambda item: (conditions.index(item.condition), SIDES.index(item.side))
    )
    for name, group in groupby(series, key=lambda item: item.condition):
        table.add_row(f"[bold]{BY_NAME[name].title}[/bold]")
        for item in group:
            row_targets = [
                targets.get((item.side, name, quantity)) for quantity in ("ratio", "late")
            ]
            table.add_row(item.side, *_cells(item, *row_targets))
        table.add_section()
    return table


def _cells(series: Series, ratio: Target | None, late: Target | None) -> list[str]:
    targets = [target for target in (ratio, late) if target is not None]
    verdict = "" if not targets else "met" if all(target.ok for target in targets) else "MISSED"
    pairs = f"{len(series.counted)} of {len(series.pairs)}"
    if not series.counted:
        return ["", "not measured", "", _limit(ratio), "", _limit(late), pairs, verdict]
    return [
        f"{series.milliseconds(alone=True):.1f}",
        f"{series.milliseconds(alone=False):.1f}",
        f"{series.ratio:.2f}",
        _limit(ratio),
        f"{series.late:.2f}",
        _limit(late),
        pairs,
        verdict,
    ]


def _limit(target: Target | None) -> str:
    return "" if target is None else f"{target.most:.3g}"
