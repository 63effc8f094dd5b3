"""`tpcompile compare`: what it prints, and that it can fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.models import preset_pair

ROW_KEYS = {"node", "layer", "max_abs", "rel", "ok"}


@pytest.mark.parametrize("options", ["", "--dtype bfloat16", "--lengths 1", "--backend torch"])
def test_models_agree(cli: Cli, options: str) -> None:
    ran = cli(f"compare preset:tiny-qwen2 --tp 4 --random-weights 0 {options}")
    assert ran.status == 0, ran.out
    assert "values compared" in ran.out
    assert "FIRST DIVERGENCE" not in ran.out


def test_json(cli: Cli) -> None:
    found = json.loads(cli("compare preset:tiny-qwen3 --tp 3 --random-weights 1 --json").out)
    assert set(found) >= {"rows", "first_divergence", "tokens_equal", "top5"}
    assert all(set(row) >= ROW_KEYS for row in found["rows"])
    assert found["tokens_equal"]
    assert found["first_divergence"] is None
    assert found["rows"][0]["source"] == "Hugging Face eager"
    assert found["rows"][-1]["node"] == "emitted"
    assert found["rows"][-1]["max_abs"] == 0.0, "emitted modules do what the graph does"


def test_a_checkpoint(cli: Cli, tmp_path: Path) -> None:
    preset_pair("qwen3-0.6b").eager.save_pretrained(tmp_path)
    assert cli(f"compare {tmp_path} --tp 5 --all").status == 0


def test_it_can_fail(cli: Cli) -> None:
    """No error at all is allowed, and other orders of summation make some."""
    ran = cli("compare preset:tiny-qwen3 --tp 3 --random-weights 0 --tolerance 0")
    assert ran.status == 1
    assert "FIRST DIVERGENCE" in ran.out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("compare preset:tiny-qwen3 --tp 2", "no weights"),
        ("compare preset:tiny-qwen3 --tp 2 --random-weights x", "not a seed"),
        ("compare preset:tiny-qwen3 --tp 2 --random-weights 0 --lengths 3,0", "not a length"),
        ("compare preset:tiny-qwen3 --tp 2 --random-weights 0 --against ego", "Did you mean eager"),
        ("compare preset:tiny-qwen3 --tp 2 --random-weights 0 --tolerance 2", "relative error"),
        ("compare preset:tiny-qwen3 --tp 2 --random-weights 0 -p canonicalize", "shards nothing"),
        ("compare preset:tiny-qwen3 --tp 7 --random-weights 0", "6 query heads"),
    ],
)
def test_bad_input(cli: Cli, line: str, said: str) -> None:
    ran = cli(line)
    assert (ran.status, ran.out) == (2, "")
    assert said in ran.err
