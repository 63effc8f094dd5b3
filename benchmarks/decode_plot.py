"""The plot of the decode benchmark: time per step against context, a panel per dtype and batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.decode_measured import (
    COMPILED,
    EAGER,
    HUGGING_FACE_TP,
    LLAMA,
    NATIVE,
    NATIVE_TWO,
    ONE,
    OPENVINO,
    TWO,
    Case,
    Measured,
    is_ours,
    sides_of,
)
from benchmarks.peers.kinds import integers_of

COLOURS = {
    NATIVE: "#b2182b",
    NATIVE_TWO: "#ef6548",
    ONE: "#f4a261",
    TWO: "#e9c46a",
    OPENVINO: "#08519c",
    LLAMA: "#238b45",
    COMPILED: "#6a51a3",
    EAGER: "#636363",
    HUGGING_FACE_TP: "#a6a6a6",
}
"""Warm colours for tpcompile, others for its peers, in the order of the legend."""
_DASHES = {"": "-", "int8": "--", "int4": ":"}
"""The styles of lines by the integers of weights; empty for a dtype."""
READ = "reading the bytes alone"


def plot(measured: Measured, path: Path) -> None:
    """Draw the decode steps to an image file."""
    from matplotlib.figure import Figure

    cases = [case for case in measured.cases if not case.prompt]
    panels = list(dict.fromkeys((case.dtype, case.batch) for case in cases))
    figure = Figure(figsize=(4.8 * len(panels) + 2.4, 4.6), dpi=160, layout="constrained")
    drawn: dict[str, Any] = {}
    for axes, (dtype, batch) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        panel_cases = sorted(
            (c for c in cases if (c.dtype, c.batch) == (dtype, batch)), key=_tokens
        )
        drawn |= _panel(axes, measured, panel_cases)
        axes.set_title(f"{dtype}, batch {batch}", fontsize=10)
    names = sorted(drawn, key=_place)
    figure.legend([drawn[name] for name in names], names, loc="outside right center", frameon=False)
    figure.suptitle(f"Milliseconds per decode step: {measured.title}", fontsize=11)
    figure.savefig(path)


def _panel(axes: Any, measured: Measured, cases: list[Case]) -> dict[str, Any]:
    """Draw one line per side. Return the lines by name."""
    lines: dict[str, Any] = {}
    for side in dict.fromkeys(side for case in cases for side in sides_of(measured, case)):
        points = [(c.tokens, ms) for c in cases if (ms := measured.milliseconds(c, side))]
        ours = is_ours(side)
        style = ("o" if ours else "s") + _DASHES[
            integers_of(measured.about(cases[0], side).weights)
        ]
        lines[side] = _line(axes, points, COLOURS[_base(side)], style, 2.0 if ours else 1.3)
        reads = [(c.tokens, 1e3 * s) for c in cases if (s := measured.read_seconds(c, side))]
        if reads and side == measured.reference:
            lines[READ] = _line(axes, reads, "black", "--", 1.3)
    axes.set_xscale("log", base=2)
    axes.set_xticks([case.tokens for case in cases], [f"{case.tokens:,}" for case in cases])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("ms per step")
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return lines


def _line(axes: Any, points: list[tuple[int, float]], colour: str, style: str, width: float) -> Any:
    xs, ys = zip(*points, strict=True)
    return axes.plot(xs, ys, style, color=colour, linewidth=width, markersize=4)[0]


def _base(side: str) -> str:
    """Return the side whose colour a side in few bits shares: the longest name it begins with."""
    return max((name for name in COLOURS if side.startswith(name)), key=len)


def _place(name: str) -> tuple[int, str]:
    """Return the place of a line in the legend."""
    return (len(COLOURS), name) if name == READ else ([*COLOURS].index(_base(name)), name)


def _tokens(case: Case) -> int:
    return case.tokens
