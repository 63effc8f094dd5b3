"""Tests of `tpcompile passes`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

from tests.cli.conftest import Cli
from tpcompile.passes import PASSES, PIPELINES, default_pipeline


def test_text(cli: Cli, golden: Callable[[str, str], None]) -> None:
    ran = cli("passes")
    assert (ran.status, ran.err) == (0, "")
    assert max(map(len, ran.out.splitlines())) <= 80
    golden("cli/passes.txt", ran.out)


def test_json_has_every_pass_and_option(cli: Cli) -> None:
    entries = json.loads(cli("passes --json").out)["passes"]
    assert [entry["name"] for entry in entries] == list(PASSES)
    standard = [entry["name"] for entry in entries if entry["standard"]]
    assert standard == [current.name for current in default_pipeline()]
    for entry in entries:
        assert entry["doc"].endswith(".")
        kind = PASSES[entry["name"]]
        defaults = {field.name: field.default for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        assert {option["name"]: option["default"] for option in entry["options"]} == defaults
        for option in entry["options"]:
            assert option["doc"].endswith("."), (entry["name"], option["name"])


def test_json_has_every_pipeline(cli: Cli) -> None:
    entries = json.loads(cli("passes --json").out)["pipelines"]
    assert [entry["name"] for entry in entries] == list(PIPELINES)
    for entry in entries:
        assert entry["doc"].endswith(".")
        kind = PIPELINES[entry["name"]]
        assert entry["passes"] == [current.name for current in kind().passes()]
        defaults = {field.name: field.default for field in dataclasses.fields(kind)}
        assert {option["name"]: option["default"] for option in entry["options"]} == defaults
        assert all(option["doc"].endswith(".") for option in entry["options"])
