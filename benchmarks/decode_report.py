"""The output of `python -m benchmarks decode`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.decode_measured import Measured

PREFILL = "prefill"


def to_json(measured: Measured) -> dict[str, Any]:
    return {
        "ok": measured.ok,
        "model": measured.model,
        "seconds": measured.seconds,
        "bandwidths": measured.bandwidths,
        "shares": {
            name: {what: measured.share(name, what) for what in own if what in measured.step_bytes}
            for name, own in measured.seconds.items()
        },
        "agreements": [asdict(agreement) for agreement in measured.agreements],
        "missing": measured.missing,
        "targets": [
            {**asdict(target), "reached": ratio, "ok": ratio is not None and ratio >= target.least}
            for target, ratio in measured.targets()
        ],
    }


def show(measured: Measured, console: Console) -> None:
    columns = list(dict.fromkeys(what for own in measured.seconds.values() for what in own))
    table = Table(title=f"{measured.model}, batch 1, greedy: ms, median (min to max) of steps")
    table.add_column("")
    for what in columns:
        table.add_column(what if what == PREFILL else f"decode at {what}", justify="right")
    for name, own in measured.seconds.items():
        cells = (_cell(own.get(what), what, measured.share(name, what)) for what in columns)
        table.add_row(name, *cells)
    for name in measured.missing:
        table.add_row(name, *["missing"] * len(columns))
    console.print(table)
    if measured.bandwidths:
        console.print(
            f"a loop that only reads: {median(measured.bandwidths) / 1e9:.1f} GB/s, in turn with "
            "the sides; shares count the weights and the KV cache"
        )
    for name, why in measured.missing.items():
        console.print(f"{name} is missing: {why}", markup=False)
    _show_agreement(measured, console)
    for target, ratio in measured.targets():
        place = target.what if target.what == PREFILL else f"decode at {target.what}"
        found = "not measured" if ratio is None else f"{ratio:.2f} ×"
        verdict = "met" if ratio is not None and ratio >= target.least else "MISSED"
        console.print(
            f"{place}, {target.side} over {target.peer}: {found}, at least "
            f"{target.least:g} ×: {verdict}"
        )


def _show_agreement(measured: Measured, console: Console) -> None:
    for side in dict.fromkeys(agreement.side for agreement in measured.agreements):
        own = [a for a in measured.agreements if a.side == side]
        worst = max(own, key=lambda a: (not a.ok, a.error))
        verdict = "agree with eager" if worst.ok else "DISAGREE with eager"
        console.print(
            f"{side}: logits {verdict}; largest error {worst.error:.1e} of the largest logit, "
            f"{worst.what}, {len(own)} comparisons"
        )


def _cell(seconds: Sequence[float] | None, what: str, share: float | None) -> str:
    if not seconds:
        return ""
    unit = [f"{1e3 * s:.1f}" for s in (median(seconds), min(seconds), max(seconds))]
    rate = "" if what == PREFILL else f"  {1 / median(seconds):.1f} tokens/s"
    of_bandwidth = "" if share is None else f"  {share:.2f} of read"
    return f"{unit[0]} ({unit[1]} to {unit[2]}){rate}{of_bandwidth}"
