"""The table of `python -m benchmarks decode`."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks.decode_measured import EAGER, Case, Measured, sides_of

COLUMNS = ("ms", "min to max", "tokens/s", "MB", "bits", "of read", "of limit")
WIDTH = 128


def show(measured: Measured, console: Console) -> None:
    """Print the table and everything that explains it, in `WIDTH` columns."""
    console.print(_table(measured))
    console.print(
        "ms: median of the steps. MB: what a step reads, the weights with scales and offsets, and "
        "the KV cache. bits: those of\na weight that is read. of read: share of the bandwidth of a "
        "loop that reads as many bytes, around each turn of the\nside. of limit: share of the "
        "speed of the longer one of this loop and of the products on weights in caches.\n×: speed "
        f"relative to {_short(measured.reference)}, and to the fastest peer with as many bits."
    )
    for dtype, weights in measured.weights.items():
        console.print(
            f"{dtype}: a step reads {weights.count:,} weights of {weights.bits:.2f} bits each"
        )
    for name, problem, why in _problems(measured):
        console.print(f"{name} {problem}: {why}", markup=False)
    _show_agreement(measured, console)
    for target, ratio in measured.targets():
        shown = "not measured" if ratio is None else f"{ratio:.2f} ×"
        verdict = "met" if ratio is not None and ratio >= target.least else "MISSED"
        console.print(
            f"{target.case}, {target.side} over {target.peer}: {shown}, at least "
            f"{target.least:g} ×: {verdict}"
        )


def _short(side: str) -> str:
    return "eager" if side == EAGER else side


def _problems(measured: Measured) -> Iterator[tuple[str, str, str]]:
    """Yield the sides that were not measured, each with what happened and why."""
    for dtype, reasons in measured.missing.items():
        for name, why in reasons.items():
            yield name, f"failed with {dtype}", why
    for name, why in measured.not_installed.items():
        yield name, "is not installed", why
    for name, why in measured.not_supported.items():
        yield name, "was not measured in all cases", why


def _table(measured: Measured) -> Table:
    table = Table(title=measured.title, box=SIMPLE, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in (*COLUMNS, f"× {_short(measured.reference)}", "× best"):
        table.add_column(name, justify="right", no_wrap=True)
    absent = dict.fromkeys(measured.not_supported, "unsupported")
    absent |= dict.fromkeys(measured.not_installed, "not installed")
    for case in measured.cases:
        failed = dict.fromkeys(measured.missing.get(case.dtype, ()), "failed")
        table.add_row(f"[bold]{case}[/bold]")
        sides = sides_of(measured, case)
        for side in sides:
            table.add_row(side, *_cells(measured, case, side))
        for side, problem in (absent | failed).items():
            if side not in sides:
                table.add_row(side, "", problem)
        table.add_section()
    return table


def _cells(measured: Measured, case: Case, side: str) -> list[str]:
    turns = measured.of(case, side)
    assert turns is not None
    seconds = turns.seconds[side]
    size, bits = measured.step_bytes(case, side), measured.bits(case, side)
    shares = measured.share(case, side), measured.share_of_limit(case, side)
    peers = measured.reference, measured.best_peer(case, side)
    ratios = [measured.ratio(case, side, peer) if peer else None for peer in peers]
    return [
        f"{1e3 * median(seconds):.1f}",
        f"{1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f}",
        f"{case.tokens_measured / median(seconds):.1f}",
        "" if size is None else f"{size / 1e6:,.0f}",
        "" if bits is None else f"{bits:.2f}",
        *("" if number is None else f"{number:.2f}" for number in (*shares, *ratios)),
    ]


def _show_agreement(measured: Measured, console: Console) -> None:
    for side, reference in dict.fromkeys(
        (agreement.side, agreement.reference) for agreement in measured.agreements
    ):
        agreements = [a for a in measured.agreements if (a.side, a.reference) == (side, reference)]
        worst = max(agreements, key=lambda a: (not a.ok, a.error))
        verdict = f"{'agree' if worst.ok else 'DISAGREE'} with {_short(reference)}"
        console.print(
            f"{side}: logits {verdict}; largest error {worst.error:.1e} of the largest logit, "
            f"{worst.what}, {len(agreements)} comparisons"
        )
