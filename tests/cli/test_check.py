"""Tests of `tpcompile check`."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tests.cli.conftest import Cli
from tpcompile.passes import (
    Pass,
    Report,
    decode_pipeline,
    default_pipeline,
    fuse_norm_gate_up,
    greedy_head,
    raise_swiglu,
    split_attention,
)
from tpcompile.vm.groups import qkv
from tpcompile.vm.lowering import LOWERINGS
from tpcompile.vm.schedule.policies import POLICIES

PASS_KEYS = {"name", "ms", "matches", "nodes_before", "nodes_after", "ok", "pipeline"}
ERROR_KEYS = {"pass", "node", "source", "rule", "got", "expected", "hint"}


def test_good(cli: Cli) -> None:
    ran = cli("check preset:tiny-qwen2 --tp 5 --json")
    report = json.loads(ran.out)
    assert (ran.status, report["ok"], report["errors"]) == (0, True, [])
    for name, passes in (("standard", default_pipeline()), ("decode", decode_pipeline())):
        rows = [row for row in report["passes"] if row["pipeline"] == name]
        assert [row["name"] for row in rows] == [p.name for p in passes]
        for row in rows:
            assert set(row) >= PASS_KEYS
            assert row["ok"]
        nodes = [(row["nodes_before"], row["nodes_after"]) for row in rows]
        assert [after for _, after in nodes[:-1]] == [before for before, _ in nodes[1:]]


def test_every_schedule_is_verified(cli: Cli) -> None:
    report = json.loads(cli("check preset:tiny-qwen3 --tp 3 --json").out)
    pairs = {(row["lowering"], row["policy"]) for row in report["schedules"]}
    assert pairs == {(lowering, policy) for lowering in LOWERINGS for policy in POLICIES}
    assert all(row["ok"] for row in report["schedules"])
    assert all(row["instructions"] > 0 < row["counters"] for row in report["schedules"])
    assert report["unscheduled"] is None


def test_schedules_with_the_same_mistake(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """All policies of a lowering schedule the same wrong program, which is said once."""
    right = qkv._qkv_operands
    monkeypatch.setattr(
        qkv, "_qkv_operands", lambda *args: dataclasses.replace(right(*args), head_eps=1e-3)
    )
    ran = cli("check preset:tiny-qwen3 --tp 1")
    assert ran.status == 1
    assert ran.out.count("where the program has 0.001") == len(LOWERINGS)
    assert ran.out.count(f", and {len(POLICIES) - 1} more: ") == len(LOWERINGS)


def test_a_pipeline_of_ones_own(cli: Cli) -> None:
    """With a user-defined pipeline, only decode graphs are scheduled."""
    report = json.loads(cli("check preset:tiny-qwen3 --tp 2 --json -p standard").out)
    assert (report["ok"], report["schedules"]) == (True, [])
    assert {row["pipeline"] for row in report["passes"]} == {"given"}
    report = json.loads(cli("check preset:tiny-qwen3 --tp 2 --json -p decode").out)
    assert (report["ok"], len(report["schedules"])) == (True, len(LOWERINGS) * len(POLICIES))


def test_many_spans(cli: Cli) -> None:
    report = json.loads(cli("check preset:tiny-qwen3 --tp 1 --json -p decode{spans=33}").out)
    assert (report["ok"], len(report["schedules"])) == (True, len(LOWERINGS) * len(POLICIES))


def test_why_there_is_no_schedule(cli: Cli) -> None:
    names = [p.name for p in decode_pipeline() if p.name != "fuse-norm-gate-up"]
    line = "check preset:tiny-qwen3 --tp 2"
    report = json.loads(cli(f"{line} --json -p", ",".join(names)).out)
    assert (report["ok"], report["schedules"]) == (True, [])
    assert "is not part of any decode instruction" in report["unscheduled"]
    table = cli(f"{line} -p", ",".join(names))
    assert table.status == 0
    assert "preset:tiny-qwen3, tp=2: no schedule. %" in table.out


MISTAKES = {
    fuse_norm_gate_up.FuseNormGateUp: "%l0_norm_linear is not part of any decode instruction: "
    "no decode fusion considered it",
    raise_swiglu.RaiseSwiglu: "fuse-norm-gate-up refused %l0_mul_8 (",
    greedy_head.GreedyHead: "the graph chooses no token",
    split_attention.SplitAttention: "%l0_cached_attention is not part of any decode instruction",
}
"""Passes that rewrite nothing, and the reasons why their graphs have no program."""


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_promised_schedule_that_is_missing_fails(
    kind: type[Pass], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph is valid and proved, but no program implements it."""
    monkeypatch.setattr(kind, "apply", lambda current, gm: Report())
    for line in ("check preset:tiny-qwen3 --tp 2", "check preset:tiny-qwen3 -p decode{spans=2}"):
        ran = cli(line)
        message = ran.out.splitlines()[-1]
        assert ran.status == 1
        assert "NO SCHEDULE of the decode step, which models of this type have. " in message
        assert MISTAKES[kind] in message, message
        without = message.rpartition("Passes without a match: ")[2].rstrip(".").split(", ")
        assert kind.name in without and "fuse-qkv" not in without
    report = json.loads(cli(f"{line} --json").out)
    (error,) = report["errors"]
    assert (report["ok"], error["rule"], error["got"]) == (False, "promised", report["unscheduled"])


def test_good_as_a_table(cli: Cli) -> None:
    ran = cli("check preset:tiny-qwen3 --tp 2")
    assert (ran.status, ran.err) == (0, "")
    count = len(LOWERINGS) * len(POLICIES)
    assert ran.out.endswith(
        "preset:tiny-qwen3, tp=2: the graph is valid after each pass\n"
        "preset:tiny-qwen3, tp=2: proved equal to the captured graph\n"
        f"preset:tiny-qwen3, tp=2: {count} schedules of a decode step are verified\n"
        "preset:tiny-qwen3, tp=2: programs compute the graph: yes, proved\n"
    )
    assert ran.out.count(" proved ") == len(default_pipeline()) + len(decode_pipeline()) + 1
    assert max(map(len, ran.out.splitlines())) <= 80


def test_failed(cli: Cli, broken_pipeline: str) -> None:
    ran = cli("check preset:tiny-qwen3 --tp 2 --json -p", broken_pipeline)
    report = json.loads(ran.out)
    assert (ran.status, report["ok"]) == (1, False)
    *before, failed = report["passes"]
    assert all(row["ok"] for row in before)
    assert set(failed) >= PASS_KEYS
    assert (failed["name"], failed["ok"]) == ("drop-collective", False)
    assert failed["nodes_before"] == before[-1]["nodes_after"]
    assert report["errors"]
    for error in report["errors"]:
        assert set(error) >= ERROR_KEYS
        assert error["pass"] == "drop-collective"
    assert "Partial(sum)" in report["errors"][0]["got"]
    assert "modeling_qwen3.py" in report["errors"][0]["source"]


def test_failed_as_a_table(cli: Cli, broken_pipeline: str) -> None:
    ran = cli("check preset:tiny-qwen3 --tp 2 -p", broken_pipeline)
    assert ran.status == 1
    assert ran.out.count("INVALID") == 1
    assert "after drop-collective\n" in ran.out
    assert "breaks the rule" in ran.out
    assert "fuse-qkv" not in ran.out


def test_bad_input_is_not_a_failed_check(cli: Cli) -> None:
    ran = cli("check preset:tiny-qwen3 --tp 7 --json")
    assert (ran.status, ran.out) == (2, "")
    assert "Expected a tp from 1 to 6" in ran.err
