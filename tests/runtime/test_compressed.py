"""Checkpoints that compressed-tensors wrote, from their files to tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

import tpcompile
from tests.compressed import group, write_compressed
from tests.models import TOLERANCE, relative_error
from tpcompile.frontend import capture

IDS = torch.arange(1, 25).reshape(2, 12)
NARROW = {"hidden_size": 76, "num_attention_heads": 3, "num_key_value_heads": 1}
"""Sizes of which neither 8 nor 16 is a divisor; three heads."""
WIDE = {"hidden_size": 128, "num_attention_heads": 8, "intermediate_size": 384}
DYNAMIC = {"num_bits": 8, "strategy": "token", "dynamic": True}
"""The layout `int-quantized` is that of schemes that also round activations."""


class Case(NamedTuple):
    """The groups of a scheme, the format that they give, and a configuration."""

    groups: tuple[dict[str, Any], ...]
    format: str
    changes: dict[str, Any]


CASES = {
    "int4 in groups of 32": Case(
        (group(4, 32),), "int4:32:f32", {"hidden_size": 96, "intermediate_size": 160}
    ),
    "int4 in groups of 64 with offsets": Case(
        (group(4, 64, symmetric=False),),
        "int4:64:bf16:offsets",
        {"intermediate_size": 192, "num_attention_heads": 4, "dtype": torch.bfloat16},
    ),
    "int4 in groups of 128": Case(
        (group(4, 128),), "int4:128:bf16", {**WIDE, "dtype": torch.bfloat16}
    ),
    "int4 in rows with offsets": Case(
        (group(4, symmetric=False),), "int4:row:f32:offsets", {**NARROW, "intermediate_size": 90}
    ),
    "int8 in rows": Case(
        (group(8),),
        "int8:row:f32",
        {
            "name": "tiny-qwen2",
            "hidden_size": 80,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "intermediate_size": 93,
        },
    ),
    "int8 in groups of 128 with offsets": Case(
        (group(8, 128, symmetric=False),), "int8:128:f32:offsets", WIDE
    ),
    "int8, not packed, with offsets": Case(
        (group(8, layout="int-quantized", symmetric=False, input_activations=DYNAMIC),),
        "int8:row:bf16:offsets",
        {**NARROW, "intermediate_size": 83, "dtype": torch.bfloat16},
    ),
    "4 bits, not packed": Case(
        (group(4, 32, layout="int-quantized", input_activations=DYNAMIC),),
        "int8:32:f32",
        {"intermediate_size": 160},
    ),
}


@pytest.fixture(scope="module", params=CASES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any, Case]:
    case = CASES[request.param]
    directory = tmp_path_factory.mktemp("compressed")
    return directory, write_compressed(directory, *case.groups, **case.changes), case


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_logits(checkpoint: tuple[Path, Any, Case], backend: str, tp: int) -> None:
    """Prompts run on modules, single tokens on the backend."""
    directory, truth, _ = checkpoint
    with torch.no_grad():
        wanted = truth(IDS).logits
    options: dict[str, Any] = {"tp": tp, "simulate": True, "backend": backend}
    with tpcompile.compile(str(directory), **options, dtype=torch.float32) as model:
        found = model(IDS[:, :-1], use_cache=True)
        assert relative_error(found.logits, wanted[:, :-1]) < TOLERANCE
        step = model(IDS[:, -1:], past_key_values=found.past_key_values, use_cache=True)
        assert relative_error(step.logits, wanted[:, -1:]) < TOLERANCE
        assert model.steps.program == (backend != "torch")


def test_the_files_own_dtype(checkpoint: tuple[Path, Any, Case]) -> None:
    """The modules of a checkpoint in bf16 round its weights to bf16."""
    directory, truth, case = checkpoint
    formats = {str(one.format) for one in capture(str(directory)).tensors.values() if one.format}
    assert formats == {case.format}
    if "bf16" in case.format:
        with tpcompile.compile(str(directory), tp=2, simulate=True, backend="torch") as model:
            with torch.no_grad():
                wanted = truth(IDS).logits
            assert relative_error(model(IDS).logits.float(), wanted) < 2e-2


@pytest.mark.parametrize("tp", [1, 3])
def test_saved_tensors(checkpoint: tuple[Path, Any, Case], tmp_path: Path, tp: int) -> None:
    """A checkpoint that a compiled model saves has the same tensors, bit for bit."""
    directory, truth, _ = checkpoint
    with tpcompile.compile(str(directory), tp=tp, simulate=True, backend="torch") as model:
        model.save_pretrained(tmp_path)
        assert model.num_parameters() == truth.num_parameters()
        state = model.state_dict()
    before, after = (load_file(one / "model.safetensors") for one in (directory, tmp_path))
    assert before.keys() == after.keys() == state.keys() - {"lm_head.weight"}
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) and torch.equal(tensor, state[name]), name
        assert tensor.dtype == after[name].dtype == state[name].dtype
    schemes = [json.loads((one / "config.json").read_text()) for one in (directory, tmp_path)]
    assert schemes[0]["quantization_config"] == schemes[1]["quantization_config"]
