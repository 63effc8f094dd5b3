"""The table of `python -m benchmarks decode`."""

from __future__ import annotations

from statistics import median

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks.decode_measured import EAGER, Case, Measured, sides_of

COLUMNS = ("ms", "min to max", "tokens/s", "of read", "× eager", "× best")
READ = "loop that only reads"


def show(measured: Measured, console: Console) -> None:
    """Print the table and everything that explains it, in 100 columns."""
    console.print(_table(measured))
    console.print(
        "ms: median of the steps. of read: the share of the bandwidth of a loop that only reads,\n"
        "in turn with the sides; weights and KV cache count. ×: speed relative to eager, and to\n"
        "the fastest peer."
    )
    for names, what in (
        (measured.missing, "failed"),
        (measured.not_installed, "is not installed"),
        (measured.not_supported, "was not measured in all cases"),
    ):
        for name, why in names.items():
            console.print(f"{name} {what}: {why}", markup=False)
    _show_agreement(measured, console)
    for target, ratio in measured.targets():
        found = "not measured" if ratio is None else f"{ratio:.2f} ×"
        verdict = "met" if ratio is not None and ratio >= target.least else "MISSED"
        console.print(
            f"{target.case}, {target.side} over {target.peer}: {found}, at least "
            f"{target.least:g} ×: {verdict}"
        )


def _table(measured: Measured) -> Table:
    table = Table(title=measured.title, box=SIMPLE, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    absent = dict.fromkeys(measured.not_supported, "unsupported")
    absent |= dict.fromkeys(measured.not_installed, "not installed")
    absent |= dict.fromkeys(measured.missing, "failed")
    for case in measured.cases:
        table.add_row(f"[bold]{case}[/bold]")
        found = [t.least_seconds for t in measured.turns if t.case == case and t.least_seconds]
        if found:
            table.add_row(READ, f"{1e3 * median(found):.1f}", "", "", "1.00")
        best = measured.best_peer(case)
        sides = sides_of(measured, case)
        for side in sides:
            table.add_row(side, *_cells(measured, case, side, best))
        for side in [name for name in absent if name not in sides]:
            table.add_row(side, "", absent[side])
        table.add_section()
    return table


def _cells(measured: Measured, case: Case, side: str, best: str | None) -> list[str]:
    turns = measured.of(case, side)
    assert turns is not None
    seconds = turns.seconds[side]
    share = measured.share(case, side)
    ratios = [measured.ratio(case, side, peer) if peer else None for peer in (EAGER, best)]
    return [
        f"{1e3 * median(seconds):.1f}",
        f"{1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f}",
        f"{case.tokens_measured / median(seconds):.1f}",
        *("" if number is None else f"{number:.2f}" for number in (share, *ratios)),
    ]


def _show_agreement(measured: Measured, console: Console) -> None:
    for side in dict.fromkeys(agreement.side for agreement in measured.agreements):
        own = [a for a in measured.agreements if a.side == side]
        worst = max(own, key=lambda a: (not a.ok, a.error))
        verdict = "agree with eager" if worst.ok else "DISAGREE with eager"
        console.print(
            f"{side}: logits {verdict}; largest error {worst.error:.1e} of the largest logit, "
            f"{worst.what}, {len(own)} comparisons"
        )
