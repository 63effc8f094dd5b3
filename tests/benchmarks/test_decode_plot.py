"""The plot of the decode benchmark has a line per side and a panel per dtype and batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from benchmarks.decode_measured import EAGER, NATIVE, Case, Loaded, Measured, Turns
from benchmarks.decode_options import specs
from benchmarks.decode_plot import COLOURS, READ, plot
from benchmarks.peers.kinds import Sizes

FEW = f"{NATIVE} int4:64"


def test_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda drawn, path: [figures.append(drawn), save(drawn, path)]
    )
    turns = [
        Turns(
            Case(dtype, 1, context),
            {EAGER: [0.2], NATIVE: [0.1 * batch], FEW: [0.05]},
            {EAGER: [[1e5, 1e5]], FEW: [[1e5, 1e5]]},
        )
        for batch, dtype in ((1, "bf16"), (2, "fp32"))
        for context in (1024, 64)
    ]
    turns.append(Turns(Case("bf16", 1, 512, prompt=True), {EAGER: [9.0]}))
    sides = {EAGER: Loaded("", Sizes(1, 1000, 0)), FEW: Loaded("int4:64", Sizes(1, 300, 0))}
    measured = Measured("m", loaded={"bf16": sides, "fp32": sides}, turns=turns)
    plot(measured, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    (figure,) = figures
    assert [axes.get_title() for axes in figure.axes] == ["bf16, batch 1", "fp32, batch 1"]
    lines = [[list(line.get_ydata()) for line in axes.lines] for axes in figure.axes]
    assert lines == [[[200, 200], [10, 10], [native, native], [50, 50]] for native in (100, 200)]
    assert [line.get_linestyle() for line in figure.axes[0].lines] == ["-", "--", "-", ":"]
    assert list(figure.axes[0].lines[0].get_xdata()) == [64, 1024]
    assert [text.get_text() for text in figure.legends[0].texts] == [NATIVE, FEW, EAGER, READ]


def test_every_side_has_a_colour() -> None:
    assert COLOURS.keys() == {spec.name for spec in specs(1)}
