"""Damaged checkpoints are refused, or give the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import tpcompile
from tests.captures import captured_once as capture
from tests.compressed import group, write_compressed
from tests.float8 import write_fp8
from tests.packed import write_awq, write_gptq
from tests.runtime.damage_files import damaged
from tpcompile.errors import CompileError
from tpcompile.frontend import Captured
from tpcompile.ir.simulate import whole_value
from tpcompile.runtime.weights import opened, weights_of

COPIES, FEW = 500, 30


class Checkpoint(NamedTuple):
    """A checkpoint with its model and values."""

    directory: Path
    captured: Captured
    values: dict[str, torch.Tensor]


def values(directory: Path, captured: Captured) -> dict[str, torch.Tensor]:
    """Return the values of all weights of a checkpoint."""
    with opened(weights_of(captured, str(directory), None)) as read:
        return {
            name: whole_value(tensor, read, torch.float32)
            for name, tensor in captured.tensors.items()
        }


def _compressed(written: Path) -> None:
    groups = (
        group(4, 32, symmetric=False),
        group(8, symmetric=False, targets=["re:.*down_proj"]),
    )
    write_compressed(written, *groups, **SIZES)


def _experts(written: Path) -> None:
    write_compressed(written, group(4, 32, symmetric=False), **EXPERTS)


EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 1,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
SIZES: dict[str, Any] = {"intermediate_size": 96, "num_hidden_layers": 1}
KINDS: dict[str, Callable[[Path], Any]] = {
    "compressed-tensors": _compressed,
    "gptq": partial(write_gptq, **SIZES),
    "gptq, symmetric": partial(write_gptq, bits=8, symmetric=True, **SIZES),
    "awq": partial(write_awq, **SIZES),
    "fp8": partial(write_fp8, block=(64, 32), **SIZES),
    "experts": _experts,
}


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    """Return a checkpoint in several files with an index; one kind has two layouts."""
    written, directory = (tmp_path_factory.mktemp(name) for name in ("written", "split"))
    KINDS[request.param](written)
    with tpcompile.compile(str(written), simulate=True, backend="torch") as model:
        model.save_pretrained(directory, max_shard_size="20KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    captured = capture(str(directory))
    formats = 3 if request.param == "compressed-tensors" else 2
    assert len({tensor.format for tensor in captured.tensors.values()}) == formats
    return Checkpoint(directory, captured, values(directory, captured))


@pytest.mark.parametrize(
    "seeds", [range(FEW), pytest.param(range(FEW, COPIES), marks=pytest.mark.slow)]
)
def test_one_fault(checkpoint: Checkpoint, tmp_path: Path, seeds: range) -> None:
    """A fault outside of the numbers themselves does not change them, or is an error of ours."""
    directory, captured, wanted = checkpoint
    refused = 0
    for seed in seeds:
        copy = tmp_path / str(seed)
        fault = damaged(directory, copy, seed)
        same = (copy / "config.json").read_bytes() == (directory / "config.json").read_bytes()
        try:
            actual = values(copy, captured if same else capture(str(copy)))
        except CompileError:
            refused += 1
            continue
        except Exception as error:
            raise AssertionError(f"{seed}, {fault}") from error
        assert actual.keys() == wanted.keys(), (seed, fault)
        assert all(torch.equal(actual[name], wanted[name]) for name in wanted), (seed, fault)
    assert 0.7 * len(seeds) < refused < len(seeds)
