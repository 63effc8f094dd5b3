"""Mixtures of experts in GGUF files, which stack the experts of a layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

import tpcompile
from tests.expert_models import IDS, logits_of, pipeline
from tests.gguf_files import check_configuration, model_of, write_gguf
from tests.models import TOLERANCE, relative_error
from tpcompile.errors import CheckpointError, UnsupportedError
from tpcompile.frontend import capture
from tpcompile.ir.simulate import whole_value
from tpcompile.runtime.weights import opened, weights_of

CHANGES: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
}
ROUTER = {"ffn_gate_inp.weight": Kind.F32}


def written(directory: Path, kind: Kind = Kind.Q8_0, **kinds: Kind) -> tuple[Path, Any]:
    """Write a file; return it, and a model with its values."""
    path = directory / "experts.gguf"
    named = {f"{name}.weight": one for name, one in kinds.items()}
    return path, write_gguf(path, model_of(**CHANGES), kind, kinds={**ROUTER, **named})


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0, Kind.Q4_0], ids=lambda kind: kind.name)
def test_logits(kind: Kind, tmp_path: Path) -> None:
    path, truth = written(tmp_path, kind, ffn_down_exps=Kind.Q8_0)
    captured = capture(str(path), dtype=torch.float32)
    with opened(weights_of(captured, str(path), None)) as read:
        for name, parameter in truth.named_parameters():
            found = whole_value(captured.tensors[name], read, torch.float32)
            assert torch.equal(found, parameter), name
    check_configuration(path, truth, ("rms_norm_eps",))
    assert int(IDS.max()) < truth.config.vocab_size
    wanted = logits_of(truth)
    options: dict[str, Any] = {"simulate": True, "backend": "torch", "dtype": "float32"}
    for tp, plan in ((2, "tp"), (3, "ep")):
        with tpcompile.compile(path, tp=tp, pipeline=pipeline(plan, tp), **options) as model:
            assert relative_error(logits_of(model), wanted) < TOLERANCE


def test_gate_and_up_of_several_kinds_are_refused(tmp_path: Path) -> None:
    path, _ = written(tmp_path, ffn_up_exps=Kind.Q4_0)
    with pytest.raises(UnsupportedError, match=r"(?s)stored alike.*experts\.0\.up_proj"):
        capture(str(path))


def test_a_router_in_blocks_is_refused(tmp_path: Path) -> None:
    path, _ = written(tmp_path, ffn_gate_inp=Kind.Q8_0)
    with pytest.raises(UnsupportedError, match=r"mlp\.gate\.weight"):
        capture(str(path))


def test_experts_that_are_not_stacked(tmp_path: Path) -> None:
    path = tmp_path / "experts.gguf"
    name, rows = "blk.0.ffn_up_exps.weight", torch.zeros(96, 64).numpy()
    model = model_of(**CHANGES, num_hidden_layers=1)
    write_gguf(path, model, Kind.F32, tensors={name.replace("blk.0", "blk.1"): (rows, Kind.F32)})
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up_exps\.weight must have the weights"):
        capture(str(path))
