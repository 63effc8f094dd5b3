"""Checkpoints of GPTQ and AWQ, from their files to logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

import tpcompile
from tests.captures import captured_once as capture
from tests.logits import check_logits, in_turn
from tests.packed import write_awq, write_gptq
from tests.quantized import rewritten
from tpcompile.errors import CheckpointError, UnsupportedError

WIDE = {"hidden_size": 128, "num_attention_heads": 8, "intermediate_size": 384}
NARROW = {"hidden_size": 72, "num_attention_heads": 3, "num_key_value_heads": 1}
LAYER = "model.layers.0"


class Case(NamedTuple):
    """A function that writes a checkpoint, and the format that it gives."""

    write: Callable[[Path], Any]
    format: str


CASES = {
    "gptq, symmetric": Case(
        partial(write_gptq, symmetric=True, zero_biases=True, intermediate_size=192), "int4:32:f16"
    ),
    "gptq, in groups of 64": Case(
        partial(write_gptq, columns=64, intermediate_size=192, num_attention_heads=4),
        "int4:64:f16:offsets",
    ),
    "gptq, second version": Case(
        partial(write_gptq, columns=128, version=2, **WIDE), "int4:128:f16:offsets"
    ),
    "gptq, whole rows": Case(
        partial(write_gptq, columns=0, intermediate_size=88, **NARROW), "int4:row:f16:offsets"
    ),
    "gptq, 8 bits": Case(
        partial(write_gptq, bits=8, name="tiny-qwen2", intermediate_size=96), "int8:32:f16:offsets"
    ),
    "gptq, 8 bits, symmetric": Case(
        partial(write_gptq, bits=8, columns=64, symmetric=True, version=2, **WIDE), "int8:64:f16"
    ),
    "awq": Case(partial(write_awq, intermediate_size=160), "int4:32:f16:offsets"),
    "awq, in groups of 128": Case(partial(write_awq, columns=128, **WIDE), "int4:128:f16:offsets"),
    "awq, whole rows": Case(
        partial(write_awq, columns=0, intermediate_size=88, **NARROW), "int4:row:f16:offsets"
    ),
    "awq, with biases": Case(
        partial(write_awq, name="tiny-qwen2", intermediate_size=96, left=("down_proj",)),
        "int4:32:f16:offsets",
    ),
}


@pytest.fixture(scope="module", params=CASES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any, Case]:
    directory, case = tmp_path_factory.mktemp("packed"), CASES[request.param]
    return directory, case.write(directory), case


@pytest.mark.parametrize(("checkpoint", "backend", "tp"), in_turn(CASES), indirect=["checkpoint"])
def test_logits(checkpoint: tuple[Path, Any, Case], backend: str, tp: int) -> None:
    directory, truth, _ = checkpoint
    check_logits(directory, truth, backend, tp)


def test_the_format_of_weights(checkpoint: tuple[Path, Any, Case]) -> None:
    """Integers and scales are those of the files; symmetric weights need no offsets."""
    directory, _, case = checkpoint
    tensors = capture(str(directory)).tensors
    assert {str(tensor.format) for tensor in tensors.values() if tensor.format} == {case.format}


@pytest.mark.parametrize("tp", [1, 3])
def test_saved_tensors(checkpoint: tuple[Path, Any, Case], tmp_path: Path, tp: int) -> None:
    """A compiled model saves the tensors that it read, but for biases of zeros."""
    directory, _, _ = checkpoint
    with tpcompile.compile(str(directory), tp=tp, simulate=True, backend="torch") as model:
        model.save_pretrained(tmp_path)
    before, after = (load_file(path / "model.safetensors") for path in (directory, tmp_path))
    gone = before.keys() - after.keys()
    assert after.keys() <= before.keys() and all(not before[name].any() for name in gone)
    assert all(name.endswith("bias") for name in gone)
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]) and tensor.dtype == before[name].dtype, name
    schemes = [json.loads((path / "config.json").read_text()) for path in (directory, tmp_path)]
    assert schemes[0]["quantization_config"] == schemes[1]["quantization_config"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a checkpoint of each kind."""
    directories = {
        name: tmp_path_factory.mktemp(name) for name in ("symmetric", "plain", "bytes", "awq")
    }
    write_gptq(directories["symmetric"], symmetric=True, zero_biases=True, intermediate_size=64)
    write_gptq(directories["plain"], intermediate_size=64)
    write_gptq(directories["bytes"], bits=8, intermediate_size=64)
    write_awq(directories["awq"], intermediate_size=64)
    return directories


def test_columns_in_another_order_are_refused(written: dict[str, Path], tmp_path: Path) -> None:
    name = f"{LAYER}.mlp.up_proj.g_idx"
    groups = torch.arange(64, dtype=torch.int32).flip(0) // 32
    directory = rewritten(written["plain"], tmp_path / "made", **{name: groups})
    with pytest.raises(CheckpointError, match=f"{name} does not match.*in order, as without desc"):
        tpcompile.compile(str(directory))


def test_zeros_that_are_not_those_of_symmetric_weights(
    written: dict[str, Path], tmp_path: Path
) -> None:
    name = f"{LAYER}.mlp.up_proj.qzeros"
    zeros = load_file(written["symmetric"] / "model.safetensors")[name]
    assert zeros.unique().tolist() == [0x77777777]
    zeros[1, 2] += 1 << 8
    directory = rewritten(written["symmetric"], tmp_path / "made", **{name: zeros})
    with pytest.raises(CheckpointError, match=r"qzeros .*Found 2004318327 at \[1, 2\].*2004318071"):
        tpcompile.compile(str(directory))


def test_other_biases_than_zeros_are_refused(written: dict[str, Path], tmp_path: Path) -> None:
    name = f"{LAYER}.mlp.up_proj.bias"
    bias = torch.zeros(64, dtype=torch.float16)
    bias[7] = 0.5
    directory = rewritten(written["symmetric"], tmp_path / "made", **{name: bias})
    with pytest.raises(CheckpointError, match=rf"{name} does not match .*Found 0.5 at \[7\]"):
        tpcompile.compile(str(directory))


def test_a_zero_that_fits_into_no_offset(written: dict[str, Path], tmp_path: Path) -> None:
    """In the first version of 8 bits, a stored 255 stands for 256, which is an offset of 128."""
    name = f"{LAYER}.mlp.up_proj.qzeros"
    zeros = load_file(written["bytes"] / "model.safetensors")[name]
    zeros[0, 0] |= 255
    directory = rewritten(written["bytes"], tmp_path / "made", **{name: zeros})
    with pytest.raises(
        CheckpointError, match="qzeros holds an integer that does not fit into int8"
    ):
        tpcompile.compile(str(directory))


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("plain", "bits", 3),
        ("plain", "group_size", 24),
        ("plain", "checkpoint_format", "marlin"),
        ("plain", "lm_head", True),
        ("plain", "dynamic", {"-:.*down.*": {}}),
        ("plain", "quant_method", "hqq"),
        ("awq", "version", "gemv"),
        ("awq", "zero_point", False),
        ("awq", "bits", 8),
        ("awq", "modules_to_not_convert", "down_proj"),
    ],
)
def test_schemes_that_are_not_read(
    written: dict[str, Path], tmp_path: Path, kind: str, name: str, value: object
) -> None:
    directory = rewritten(written[kind], tmp_path / "made")
    text = json.loads((directory / "config.json").read_text())
    text["quantization_config"][name] = value
    (directory / "config.json").write_text(json.dumps(text))
    with pytest.raises(UnsupportedError, match=rf"quantization_config\.{name}"):
        tpcompile.compile(str(directory))
