"""The Pipeline view: passes, their changes, and what became of values."""

from __future__ import annotations

import re

from tests.browser.checks.texts import names
from tests.browser.reader import Reader
from tests.browser.subject import TP, Truth
from tpcompile.ir.info import info_of

SHOWN = ("inputs", "outside of the layers", "result", "layer 0", "layer 1")
"""The sections that are shown until insert-collectives: the last layers are folded into layer 1."""
_PAIRS = (("insert-collectives", "fuse-qkv"), ("vocab-parallel", "insert-collectives"))


def passes(reader: Reader, truth: Truth) -> None:
    """Read the list of passes: the matches of each, and by how much the graph grew."""
    reader.go(view="pipeline", c=0)
    reader.unfold("details.quiet-passes")
    texts = [text.replace("\xa0", " ") for text in reader.texts("button.pass")]
    entries = {text.partition("\n")[0]: text for text in texts}
    assert list(entries) == [stage.name for stage in truth.stages]
    first, *later = truth.stages
    assert f"{first.stats.nodes_after} nodes" in entries[first.name]
    for stage in later:
        stats, text = stage.stats, entries[stage.name]
        change = stats.nodes_after - stats.nodes_before
        sign = "+" if change > 0 else "−"
        assert re.search(rf"· {stats.matches} match(es)? ·", text), text
        assert (f"{sign}{abs(change)} nodes" in text) == bool(change), text
        assert re.search(r"\n[\d.,]+ ms ·.*check [\d.,]+ ms ✓", text), text


def diff(reader: Reader, truth: Truth) -> None:
    """Read a pass side by side: the lines that it removed and added."""
    for before, after in (
        ("insert-collectives", "fuse-qkv"),
        ("vocab-parallel", "insert-collectives"),
    ):
        reader.go(view="pipeline", c=0, **{"pass": after})
        heads = reader.texts("table.sides thead th")
        assert heads == [f"prompts, tp={TP}: {before}", f"prompts, tp={TP}: {after}"]
        lines = {
            name: {line for section, line in truth.lines.stages[name].values() if section in SHOWN}
            for name in (before, after)
        }
        left = {_line(text) for text in _cells(reader, 1)}
        right = {_line(text) for text in _cells(reader, 2)}
        assert left == lines[before] - lines[after]
        assert right == lines[after] - lines[before]
        assert right


def _cells(reader: Reader, column: int) -> list[str]:
    kinds = ", ".join(
        f"table.sides tr.{kind} td.line:nth-child({column})"
        for kind in ("added", "removed", "changed")
    )
    return reader.texts(kinds)


def _line(text: str) -> str:
    return text.partition(" → ")[0]


def fates(reader: Reader, truth: Truth) -> None:
    """Read what became of the three projections that one took the place of."""
    reader.go(view="pipeline", c=0, **{"pass": "fuse-qkv"})
    cells = [text for text in _cells(reader, 1) if " → " in text]
    fate_of = {names([text])[0]: text.partition(" → ")[2] for text in cells}
    fused = "l0_q_k_v_proj_weight"
    old = [
        name
        for name in truth.lines.stages["insert-collectives"]
        if re.fullmatch(r"l0_[qkv]_proj_weight", name)
    ]
    assert len(old) == 3
    assert {name: fate_of[name] for name in old} == dict.fromkeys(old, f"fused into %{fused}")
    reader.go(view="pipeline", c=0, **{"pass": "fuse-qkv"}, node="l1_k_proj_weight")
    assert f"fuse-qkv fused it into %{fused.replace('l0', 'l1')}" in reader.text("#details")


def beside(reader: Reader, truth: Truth) -> None:
    """Read the same pass of two compilations side by side."""
    places = {stage.name: place for place, stage in enumerate(truth.stages)}
    left = f"2:{places['plan-sharding']}"
    reader.go(view="pipeline", c=0, left=left, **{"pass": "plan-sharding"})
    assert reader.texts("table.sides thead th") == [
        "prompts, tp=2: plan-sharding",
        f"prompts, tp={TP}: plan-sharding",
    ]
    left = f"2:{places['shard-linears']}"
    reader.go(view="pipeline", c=0, left=left, **{"pass": "shard-linears"})
    rows = [
        row for row in reader.rows("table.sides") if any("%l0_o_proj_weight = " in c for c in row)
    ]
    [[evenly, by_block]] = [[_line(cell) for cell in row] for row in rows]
    assert by_block == truth.lines.stages["shard-linears"]["l0_o_proj_weight"][1]
    assert evenly == by_block.replace("96:32|32|16|16", "96:2×48") != by_block


def overview(reader: Reader, truth: Truth) -> None:
    """Read what the page is about."""
    reader.go(view="pipeline", c=0)
    facts = dict(reader.rows("#details"))
    assert facts["class"] == info_of(truth.graph).model
    assert facts["ranks"] == str(TP)
    assert reader.text("h1") == f"{info_of(truth.graph).name}, tp={TP}"
