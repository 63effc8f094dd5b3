"""Tests of `--adapter` of the commands."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from tests.adapters import adapter, base_model, merged_model
from tests.cli.conftest import Cli
from tpcompile.presets import preset


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("adapted")
    base = base_model(AutoConfig.for_model(**preset("tiny-qwen3")), directory / "base")
    return base, adapter(base, directory / "adapter", r=4, target_modules="all-linear")


def test_generate(cli: Cli, pair: tuple[Path, Path]) -> None:
    base, path = pair
    ids = torch.tensor([[3, 4, 5]])
    how = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    expected = merged_model(base, path).generate(ids, **how)[0].tolist()
    ran = cli(f"generate {base} --adapter {path} --prompt-ids 3,4,5 --max-new-tokens 6")
    assert ran.status == 0, ran.err
    assert ran.out.strip().split(",") == [str(token) for token in expected]


@pytest.mark.parametrize("command", ["plan", "compare", "check"])
def test_commands_take_it(cli: Cli, pair: tuple[Path, Path], command: str) -> None:
    base, path = pair
    ran = cli(f"{command} {base} --tp 2 --adapter {path}")
    assert ran.status == 0, ran.err + ran.out


@pytest.mark.parametrize("command", ["plan", "dump", "schedule", "explore"])
def test_one_that_does_not_fit_is_refused_without_weights(
    cli: Cli, pair: tuple[Path, Path], tmp_path: Path, command: str
) -> None:
    more = {"explore": f"-o {tmp_path}/page.html", "schedule": "--target cpu"}.get(command, "")
    ran = cli(f"{command} preset:tiny-qwen2 --adapter {pair[1]} {more}")
    assert (ran.status, ran.out) == (2, "")
    assert "The adapter may belong to another base model" in ran.err


def test_a_directory_that_is_no_adapter(cli: Cli, pair: tuple[Path, Path]) -> None:
    ran = cli(f"plan {pair[0]} --adapter {pair[0]}")
    assert (ran.status, ran.out) == (2, "")
    assert "--adapter must be a directory with an adapter_config.json" in ran.err
