"""Tests of the pass manager's instruments."""

from __future__ import annotations

from tests.inspect.stages import lowered
from tpcompile.inspect.instruments import KeepStages, PassLog, PrintAfter, PrintDiff
from tpcompile.ir.text import format_graph
from tpcompile.passes import default_pipeline
from tpcompile.rewriting.manager import Stats

NAMES = [current.name for current in default_pipeline()]


def test_stages_are_kept_as_they_stood() -> None:
    every, single = KeepStages(format_graph), KeepStages(format_graph, frozenset({"kv-heads"}))
    gm = lowered(2, every, single)
    assert [name for name, _ in every.stages] == ["capture", *NAMES]
    assert every.stages[-1][1] == format_graph(gm)
    assert single.stages == [stage for stage in every.stages if stage[0] == "kv-heads"]
    assert len({text for _, text in every.stages}) > 10


def test_print_after() -> None:
    written: list[str] = []
    gm = lowered(2, PrintAfter(format_graph, written.append, frozenset({"cache-kv"})))
    (text,) = written
    header, _, graph = text.partition("\n")
    assert header == "# after cache-kv: 2 matches, 91 → 95 nodes"
    assert graph == format_graph(gm)


def test_print_diff() -> None:
    written: list[str] = []
    keeper = KeepStages(format_graph)
    lowered(2, keeper, PrintDiff(format_graph, written.append))
    assert len(written) == len(NAMES)
    texts = [text for _, text in keeper.stages]
    for diff, before, after in zip(written, texts, texts[1:], strict=False):
        lines = diff.splitlines()[3:]
        new = [line[1:] for line in lines if line.startswith("+")]
        old = [line[1:] for line in lines if line.startswith("-")]
        assert set(new) <= set(after.splitlines())
        assert set(old) <= set(before.splitlines())
        assert set(after.splitlines()) - set(before.splitlines()) <= set(new)


def test_no_change_is_said() -> None:
    written: list[str] = []
    lowered(2, PrintDiff(format_graph, written.append), pipeline="canonicalize,canonicalize")
    assert written[1].splitlines()[1:] == ["no change"]
    assert "0 matches" in written[1]


def test_log() -> None:
    log = PassLog()
    gm = lowered(2, log)
    assert [row.name for row in log.rows] == NAMES
    assert log.rows[-1].nodes_after == len(gm.graph.nodes)
    assert all(row.ok for row in log.rows)
    log.failed("broken", Stats(1.23456, 0.5, 2, 80, 79))
    assert log.rows[-1].to_json() == {
        "name": "broken",
        "ms": 1.235,
        "check_ms": 0.5,
        "matches": 2,
        "nodes_before": 80,
        "nodes_after": 79,
        "ok": False,
        "proof_ms": 0.0,
        "unproved": "",
    }
    table = log.table(verdict=True)
    assert table.count("INVALID") == 1
    assert "INVALID" not in log.table()
    assert all(len(line) <= 80 and line == line.rstrip() for line in table.splitlines())
