"""Tests of `tpcompile presets`."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.cli.conftest import Cli
from tpcompile.cli.presets import parameters
from tpcompile.frontend import config_of
from tpcompile.frontend.source import module_of
from tpcompile.presets import MIXTURES, PRESETS, preset


def test_the_table(cli: Cli, golden: Callable[[str, str], None]) -> None:
    ran = cli("presets")
    assert (ran.status, ran.err) == (0, "")
    assert max(map(len, ran.out.splitlines())) <= 80
    golden("cli/presets.txt", ran.out)


def test_json_holds_the_configurations(cli: Cli) -> None:
    presets = json.loads(cli("presets --json").out)["presets"]
    assert [entry.pop("name") for entry in presets] == list(PRESETS)
    assert presets == list(PRESETS.values())


@pytest.mark.parametrize(
    "name",
    [
        *("qwen2.5-0.5b", "qwen2.5-7b", "qwen3-0.6b", "tiny-qwen3"),
        *("qwen3.5-0.8b", "qwen3.5-9b", "qwen3.5-27b", "tiny-qwen3.5"),
        *MIXTURES,
        *("tiny-qwen3-moe", "tiny-qwen3.5-moe"),
    ],
)
def test_parameters_are_those_of_the_model(name: str) -> None:
    model = module_of(config_of(f"preset:{name}"), None)
    assert parameters(preset(name)) == model.num_parameters()
