"""`tpcompile check`."""

from __future__ import annotations

import json

from tests.cli.conftest import Cli
from tpcompile.passes import default_pipeline

PASS_KEYS = {"name", "ms", "matches", "nodes_before", "nodes_after", "ok"}
ERROR_KEYS = {"pass", "node", "source", "rule", "got", "expected", "hint"}


def test_good(cli: Cli) -> None:
    ran = cli("check preset:tiny-qwen2 --tp 5 --json")
    found = json.loads(ran.out)
    assert (ran.status, found["ok"], found["errors"]) == (0, True, [])
    assert [row["name"] for row in found["passes"]] == [p.name for p in default_pipeline()]
    for row in found["passes"]:
        assert set(row) >= PASS_KEYS
        assert row["ok"]
    nodes = [(row["nodes_before"], row["nodes_after"]) for row in found["passes"]]
    assert [after for _, after in nodes[:-1]] == [before for before, _ in nodes[1:]]


def test_good_as_a_table(cli: Cli) -> None:
    ran = cli("check preset:tiny-qwen3 --tp 2")
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.endswith("preset:tiny-qwen3, tp=2: the graph is valid after each pass\n")
    assert ran.out.count(" valid ") == len(default_pipeline()) + 1
    assert max(map(len, ran.out.splitlines())) <= 80


def test_failed(cli: Cli, broken_pipeline: str) -> None:
    ran = cli("check preset:tiny-qwen3 --tp 2 --json -p", broken_pipeline)
    found = json.loads(ran.out)
    assert (ran.status, found["ok"]) == (1, False)
    *before, failed = found["passes"]
    assert all(row["ok"] for row in before)
    assert set(failed) >= PASS_KEYS
    assert (failed["name"], failed["ok"]) == ("drop-collective", False)
    assert failed["nodes_before"] == before[-1]["nodes_after"]
    assert found["errors"]
    for error in found["errors"]:
        assert set(error) >= ERROR_KEYS
        assert error["pass"] == "drop-collective"
    assert "Partial(sum)" in found["errors"][0]["got"]
    assert "modeling_qwen3.py" in found["errors"][0]["source"]


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
    assert "Expected tp of 1 to 6" in ran.err
