"""Tests of `tpcompile quantize`, and of --weights on other commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.runtime.test_quantizing import made_model
from tpcompile.demo.model import make_demo

pytestmark = pytest.mark.usefixtures("captured_once")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo") / "demo"
    make_demo(directory, steps=1)
    return directory


def test_table(cli: Cli, demo: Path, tmp_path: Path) -> None:
    ran = cli(f"quantize {demo} --weights int4:row -o {tmp_path}/made")
    assert ran.status == 0, ran.err
    assert max(map(len, ran.out.splitlines())) <= 80
    assert "lm_head.weight" in ran.out and "int8:row:f32" in ran.out
    assert "all tensors: 3.1 MB before, 0.9 MB after" in ran.out
    assert "nats, the same choice after" in ran.out
    again = cli(f"quantize {demo} --weights int4:row -o {tmp_path}/made")
    assert again.status == 2 and "is not empty" in again.err


def test_json(cli: Cli, demo: Path, tmp_path: Path) -> None:
    line = f"quantize {demo} --weights int8:row --head keep --json"
    report = json.loads(cli(f"{line} --text Cat -o {tmp_path}/made").out)
    assert set(report) == {"directory", "layers", "bytes_before", "bytes_after", "logits"}
    assert all(set(layer) == {"name", "format", "bytes", "rel_error"} for layer in report["layers"])
    assert set(report["logits"]) == {"tokens", "kl", "top1", "max_abs", "mean_abs"}


def test_activations(cli: Cli, demo: Path, tmp_path: Path) -> None:
    """The weights are the same, and the logits differ more."""
    line = f"quantize {demo} --weights int8:row --json --text Cat"
    reports = [
        json.loads(cli(f"{line} --activations {bits} -o {tmp_path}/{bits}").out)
        for bits in ("16", "int8")
    ]
    assert reports[0]["layers"] == reports[1]["layers"]
    plain, rounding = (report["logits"]["mean_abs"] for report in reports)
    assert rounding > plain
    assert len({(tmp_path / bits / "config.json").read_text() for bits in ("16", "int8")}) == 1


def test_no_tokenizer(cli: Cli, tmp_path: Path) -> None:
    made_model().save_pretrained(tmp_path / "plain")
    line = f"quantize {tmp_path}/plain --weights int4:48 -o {tmp_path}"
    ran = cli(f"{line}/a")
    assert ran.status == 0 and "has no tokenizer, so no logits are compared" in ran.err
    ran = cli(f"{line}/b --text Cat")
    assert ran.status == 2 and "holds no tokenizer" in ran.err and not (tmp_path / "b").exists()
    assert "Compare no logits: --no-logits" in ran.err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("quantize preset:tiny-qwen3 --weights int4 -o x", "a configuration without weights"),
        ("quantize nothing-here -o x", "required: --weights"),
        ("plan preset:tiny-qwen3 --weights int3", "--weights: must be int8 or int4"),
        ("plan preset:tiny-qwen3 --head int4", "Found --head int4. Add --weights int8"),
        ("plan preset:tiny-qwen3 --weights int4 --head int3", "--head: 'int3' is not a valid"),
        ("plan preset:tiny-qwen3 --weights int4 --activations 8", "--activations: '8' is not a"),
        ("plan preset:tiny-qwen3 --activations int8", "Found --activations int8. Add --weights"),
    ],
)
def test_refusals(cli: Cli, line: str, message: str) -> None:
    ran = cli(line)
    assert (ran.status, ran.out) == (2, "")
    assert message in ran.err


@pytest.mark.parametrize(
    "line",
    [
        "generate preset:tiny-qwen3 --random-weights 0 --prompt-ids 1,2 --backend torch",
        "compare preset:tiny-qwen3 --random-weights 0 --lengths 3 --backend reference --steps 1",
        "schedule preset:tiny-qwen3 --target cpu --workers 2",
        "dump preset:tiny-qwen3 --tp 2",
    ],
)
def test_commands_take_weights(cli: Cli, line: str) -> None:
    ran = cli(f"{line} --weights int4:16")
    assert ran.status == 0, ran.err
    if line.startswith("dump"):
        assert "int4:16:f32" in ran.out and "int8:16:f32" in ran.out
