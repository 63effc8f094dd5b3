"""Mixtures of experts in GGUF files, which stack the experts of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM

import tpcompile
from tests.captures import captured_once
from tests.expert_models import IDS, logits_of
from tests.gguf_files import check_configuration, model_of, write_gguf
from tests.logits import check_logits
from tests.models import NEXT_CONFIG, TOLERANCE, relative_error
from tpcompile.errors import CheckpointError, UnsupportedError
from tpcompile.frontend import Captured, capture
from tpcompile.gguf import open_gguf
from tpcompile.ir.simulate import whole_value
from tpcompile.options import passes_for
from tpcompile.passes import run_passes
from tpcompile.runtime.model import CompiledModel
from tpcompile.runtime.weights import opened, weights_of

EXPERTS: dict[str, Any] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 160}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe": ("tiny-qwen2", SHARED),
    "qwen3_moe": ("tiny-qwen3", {**EXPERTS, "norm_topk_prob": True}),
    "qwen3_5_moe_text": (
        "tiny-qwen3.5-moe",
        {**SHARED, "full_attention_interval": 2, "linear_value_head_dim": 32},
    ),
    "qwen3_next": (
        "tiny-qwen3.5-moe",
        {
            **SHARED,
            "full_attention_interval": 2,
            "linear_value_head_dim": 32,
            "rope_parameters": NEXT_CONFIG["rope_parameters"],
            "intermediate_size": 192,
        },
    ),
}
"""Presets and changes of them, by the class."""
SHARING = ["qwen2_moe", "qwen3_5_moe_text", "qwen3_next"]
"""Classes with a shared expert."""
ROUTER = {"ffn_gate_inp.weight": Kind.F32, "ffn_gate_inp_shexp.weight": Kind.F32}
OLDER = {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 192}
"""Widths of experts that follow from an MLP that is 192 wide, with 2 experts of a token."""
SUPER = {"hidden_size": 256, "num_attention_heads": 4, "moe_intermediate_size": 256}
"""Rows of whole superblocks of 256 columns, but for those of the shared expert."""
CASES: list[tuple[str, Kind, dict[str, Kind], dict[str, Any]]] = [
    *(
        (family, kind, {"ffn_down_exps": Kind.Q8_0}, {})
        for family in FAMILIES
        for kind in (Kind.F32, Kind.Q8_0, Kind.Q4_0)
    ),
    ("qwen2_moe", Kind.Q4_K, {"ffn_down_exps": Kind.Q6_K, "ffn_down_shexp": Kind.Q8_0}, SUPER),
    ("qwen2_moe", Kind.Q5_K, {"ffn_down_exps": Kind.Q5_1, "ffn_down_shexp": Kind.Q5_0}, SUPER),
    ("qwen2_moe", Kind.Q8_0, {"ffn_gate_shexp": Kind.BF16, "ffn_up_shexp": Kind.BF16}, {}),
    (
        "qwen3_5_moe_text",
        Kind.Q4_K,
        {"ffn_down_exps": Kind.Q6_K, "ffn_down_shexp": Kind.Q8_0, "ssm_out": Kind.Q8_0},
        SUPER,
    ),
    (
        "qwen3_next",
        Kind.Q4_K,
        {
            **dict.fromkeys(("attn_qkv", "attn_gate", "ffn_down_exps"), Kind.Q6_K),
            **dict.fromkeys(("ffn_down_shexp", "ssm_out"), Kind.Q8_0),
        },
        SUPER,
    ),
]


def written(
    directory: Path,
    kind: Kind = Kind.Q8_0,
    family: str = "qwen3_moe",
    changes: Mapping[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
    **kinds: Kind,
) -> tuple[Path, Any]:
    """Write a file; return it, and a model with its values."""
    path = directory / "experts.gguf"
    named = {f"{name}.weight": tensor_kind for name, tensor_kind in kinds.items()}
    name, defaults = FAMILIES[family]
    model = model_of(name, model_type=family, **{**defaults, **(changes or {})})
    return path, write_gguf(path, model, kind, kinds={**ROUTER, **named}, more=more)


def check_values(path: Path, truth: Any) -> Captured:
    """Compare all values of a file with those of the library gguf, and the configuration."""
    captured = captured_once(str(path), dtype=torch.float32)
    with opened(weights_of(captured, str(path), None)) as read:
        for name, parameter in truth.named_parameters():
            value = whole_value(captured.tensors[name], read, torch.float32)
            assert torch.equal(value, parameter), name
    check_configuration(path, truth, ("rms_norm_eps",))
    return captured


PLANS = [(1, "tp"), (2, "tp"), (2, "ep"), (3, "tp"), (3, "ep")]
"""Numbers of ranks and plans, of which each case has two by default."""
SOME = [(PLANS * 2)[place::3][:2] for place in range(len(PLANS))]


@pytest.mark.parametrize(
    ("case", "plans"),
    [
        pytest.param(case, plans, marks=[pytest.mark.slow] * (plans is not some))
        for case, some in zip(CASES, cycle(SOME), strict=False)
        for plans in (some, [plan for plan in PLANS if plan not in some])
    ],
    ids=lambda value: str(value[0]) if isinstance(value[0], str) else str(value),
)
def test_logits(
    case: tuple[str, Kind, dict[str, Kind], dict[str, Any]],
    plans: list[tuple[int, str]],
    tmp_path: Path,
) -> None:
    family, kind, kinds, changes = case
    path, truth = written(tmp_path, kind, family, changes, **kinds)
    captured = check_values(path, truth)
    assert int(IDS.max()) < truth.config.vocab_size
    wanted = logits_of(truth)
    for tp, plan in plans:
        graph, stages = run_passes(captured.graph, passes_for(None, tp, experts=plan))
        with (
            opened(weights_of(captured, str(path), None)) as read,
            CompiledModel.simulated(captured, graph, stages, read) as model,
        ):
            assert relative_error(logits_of(model), wanted) < TOLERANCE, (tp, plan)


@pytest.mark.parametrize("family", SHARING)
@pytest.mark.parametrize("backend", ["reference", "native"])
def test_programs(backend: str, family: str, tmp_path: Path) -> None:
    path, truth = written(tmp_path, Kind.Q8_0, family, {"linear_key_head_dim": 32})
    check_logits(path, truth, backend, 2)


def other_shapes(patch: pytest.MonkeyPatch, *, stacked: bool = True) -> None:
    """Write gates of shared experts as vectors, and gate and up of experts as one stack."""
    add, gates = gguf.GGUFWriter.add_tensor, {}

    def changed(writer: Any, name: str, data: Any, raw_dtype: Kind) -> None:
        if stacked and "ffn_gate_exps" in name:
            gates[name] = data
            return
        if stacked and "ffn_up_exps" in name:
            data = np.concatenate((gates.pop(name.replace("up", "gate")), data), 1)
            name = name.replace("up", "gate_up")
        add(writer, name, data[0] if "shexp" in name and len(data) == 1 else data, None, raw_dtype)

    patch.setattr(gguf.GGUFWriter, "add_tensor", changed)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", SHARING)
def test_other_shapes_of_the_same_tensors(
    family: str, kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_shapes(monkeypatch)
    path, truth = written(tmp_path, kind, family)
    stored = {name: tensor.shape for name, tensor in open_gguf(path).tensors.items()}
    assert stored["blk.1.ffn_gate_inp_shexp.weight"] == (truth.config.hidden_size,)
    assert stored["blk.1.ffn_gate_up_exps.weight"] == (5, 192, truth.config.hidden_size)
    check_values(path, truth)


def test_values_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers reads gates as vectors alone, and knows the widths of experts by default."""
    other_shapes(monkeypatch, stacked=False)
    widths = {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
    path, truth = written(tmp_path, Kind.Q8_0, "qwen2_moe", {**widths, "num_hidden_layers": 1})
    load: Any = AutoModelForCausalLM.from_pretrained
    wanted = load(tmp_path, gguf_file=path.name, dtype=torch.float32)
    assert wanted.config.norm_topk_prob == truth.config.norm_topk_prob
    truth.load_state_dict(wanted.state_dict())
    check_values(path, truth)


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_widths_that_older_files_leave_out(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They follow from the width of an MLP, as in llama.cpp."""
    for part in ("expert", "expert_shared"):
        name = f"add_{part}_feed_forward_length"
        monkeypatch.setattr(gguf.GGUFWriter, name, lambda writer, length: None)
    path, truth = written(tmp_path, family=family, changes={"intermediate_size": 192, **OLDER})
    check_configuration(path, truth, ("rms_norm_eps",))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"expert_count": 0}, "expert_count=0. Expected a positive integer"),
        ({"expert_feed_forward_length": 0}, "length=0. Expected a positive integer"),
        ({"expert_shared_feed_forward_length": "160"}, "length='160'. Expected a positive"),
        ({"expert_shared_feed_forward_length": 96}, r"shared_expert\..* does not match"),
        ({"expert_feed_forward_length": 48}, r"experts\..* does not match"),
        ({"expert_weights_norm": True}, r"does not read this property.*expert_weights_norm"),
    ],
)
def test_properties_that_are_refused(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    metadata = {f"qwen2moe.{word}": value for word, value in more.items()}
    path, _ = written(tmp_path, family="qwen2_moe", more=metadata)
    with pytest.raises((CheckpointError, UnsupportedError), match=f"(?s){message}"):
        tpcompile.compile(str(path), backend="torch")


def test_gate_and_up_of_several_kinds_are_refused(tmp_path: Path) -> None:
    path, _ = written(tmp_path, ffn_up_exps=Kind.Q4_0)
    with pytest.raises(UnsupportedError, match=r"(?s)stored alike.*experts\.0\.up_proj"):
        capture(str(path))


@pytest.mark.parametrize(
    ("more", "kind", "message"),
    [
        ({}, Kind.Q4_0, r"blk\.0\.attn_qkv\.weight and .* stored alike.*Q8_0 and Q4_0"),
        ({"ssm.inner_size": 96}, Kind.Q8_0, r"rows of all heads.*\[288, 64\].*192 and 96 rows"),
        ({"rope.dimension_sections": [1, 1, 1]}, Kind.Q8_0, r"not read.*dimension_sections"),
    ],
)
def test_fused_projections_that_are_refused(
    more: dict[str, Any], kind: Kind, message: str, tmp_path: Path
) -> None:
    metadata = {f"qwen3next.{word}": value for word, value in more.items()}
    path, _ = written(tmp_path, Kind.Q8_0, "qwen3_next", more=metadata, attn_gate=kind)
    with pytest.raises((CheckpointError, UnsupportedError), match=f"(?s){message}"):
        capture(str(path))


def test_gates_that_the_file_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = gguf.GGUFWriter.add_tensor

    def changed(writer: Any, name: str, data: Any, raw_dtype: Kind) -> None:
        if name != "blk.0.attn_gate.weight":
            add(writer, name, data, None, raw_dtype)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", changed)
    path, _ = written(tmp_path, Kind.Q8_0, "qwen3_next")
    with pytest.raises(CheckpointError, match=r"lacks the tensor blk\.0\.attn_gate\.weight"):
        capture(str(path))


def test_a_router_in_blocks_is_refused(tmp_path: Path) -> None:
    path, _ = written(tmp_path, ffn_gate_inp=Kind.Q8_0)
    with pytest.raises(UnsupportedError, match=r"mlp\.gate\.weight"):
        capture(str(path))


def test_experts_that_are_not_stacked(tmp_path: Path) -> None:
    path = tmp_path / "experts.gguf"
    name, rows = "blk.0.ffn_up_exps.weight", torch.zeros(96, 64).numpy()
    name_of, defaults = FAMILIES["qwen3_moe"]
    model = model_of(name_of, model_type="qwen3_moe", **defaults, num_hidden_layers=1)
    write_gguf(path, model, Kind.F32, tensors={name.replace("blk.0", "blk.1"): (rows, Kind.F32)})
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up_exps\.weight must have the weights"):
        capture(str(path))
