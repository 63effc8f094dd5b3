"""Checkpoints with experts as tensors of their own, or stacked: a rank reads exactly its part."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

import tpcompile
from tests.expert_models import EXPERTS, FEATURES, SIZES, logits_of, mixture, pipeline, sharding
from tests.models import TOLERANCE, relative_error
from tpcompile.checkpoint_files import INDEX, SINGLE
from tpcompile.compare.agreement import same_bits
from tpcompile.errors import CheckpointError
from tpcompile.frontend import capture
from tpcompile.ir.meta import parameter_of, parameters
from tpcompile.ir.pieces import evaluate
from tpcompile.passes import run_passes
from tpcompile.runtime.weights import opened, weights_of

LAYER = "model.layers.1.mlp.experts"
Tensors = dict[str, torch.Tensor]


def stack(tensors: Tensors) -> None:
    """Replace tensors of experts by stacked ones."""
    for layer in range(SIZES["num_hidden_layers"]):
        path = f"model.layers.{layer}.mlp.experts"
        parts = {
            linear: torch.stack(
                [tensors.pop(f"{path}.{e}.{linear}.weight") for e in range(EXPERTS)]
            )
            for linear in ("gate_proj", "up_proj", "down_proj")
        }
        tensors[f"{path}.gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], 1)
        tensors[f"{path}.down_proj"] = parts["down_proj"]


def rewritten(directory: Path, change: Callable[[Tensors], object]) -> Path:
    """Change the tensors of a checkpoint."""
    tensors = load_file(directory / SINGLE)
    change(tensors)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, directory / SINGLE, metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2_moe"])
@pytest.mark.parametrize("stacked", [False, True], ids=["one by one", "stacked"])
def test_a_checkpoint_compiles_to_eager(kind: str, stacked: bool, tmp_path: Path) -> None:
    eager = mixture(kind)
    eager.save_pretrained(tmp_path / "eager")
    name = f"{LAYER}.3.up_proj.weight"
    assert name in load_file(tmp_path / "eager" / SINGLE)
    if stacked:
        rewritten(tmp_path / "eager", stack)
    gate_up = eager.get_parameter(f"{LAYER}.gate_up_proj")
    for tp, plan in ((1, "tp"), (2, "tp"), (3, "tp"), (3, "ep")):
        with tpcompile.compile(
            tmp_path / "eager", tp=tp, simulate=True, backend="torch", pipeline=pipeline(plan, tp)
        ) as model:
            assert relative_error(logits_of(model), logits_of(eager)) < TOLERANCE
            state, wanted = model.state_dict(), eager.state_dict()
            assert list(state) == list(wanted)
            assert all(same_bits(state[key], wanted[key]) for key in wanted)
            assert torch.equal(model.gather_weight(f"{LAYER}.gate_up_proj"), gate_up)
            assert torch.equal(model.gather_weight(name), gate_up[3, FEATURES:])
            if plan == "ep":
                model.save_pretrained(tmp_path / "found")
    saved = load_file(tmp_path / "found" / SINGLE)
    eager.save_pretrained(tmp_path / "again")
    wanted = load_file(tmp_path / "again" / SINGLE)
    assert list(saved) == list(wanted)
    assert all(torch.equal(saved[key], wanted[key]) for key in wanted)


def test_what_is_saved_in_several_files_is_read_back(tmp_path: Path) -> None:
    eager = mixture("qwen2_moe").bfloat16()
    with tpcompile.compile(eager, tp=2, simulate=True, backend="torch") as model:
        model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert f"{LAYER}.0.gate_proj.weight" in (tmp_path / INDEX).read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    state, wanted = loaded.state_dict(), eager.state_dict()
    assert list(state) == list(wanted) and all(same_bits(state[n], wanted[n]) for n in wanted)


def count_reads(read: Any, counts: Tensors) -> None:
    """Count how often each element of the files is read."""
    whole, shapes = read._files.read, read._files.shapes

    def counting(name: str, index: Any) -> Any:
        counts.setdefault(name, torch.zeros(shapes[name]))[index] += 1
        return whole(name, index)

    read._files.read = counting


@pytest.mark.parametrize("plan", ["tp", "ep"])
def test_a_rank_reads_exactly_its_part(plan: str, tmp_path: Path) -> None:
    """Each element of a rank's experts is read once, and no element of another rank's."""
    mixture().save_pretrained(tmp_path)
    captured = capture(str(tmp_path))
    tp = 3
    graph, _ = run_passes(captured.graph, sharding(plan, tp))
    for rank in range(tp):
        counts: Tensors = {}
        with opened(weights_of(captured, str(tmp_path), None)) as read:
            count_reads(read, counts)
            for node in parameters(graph.graph):
                evaluate(parameter_of(node).shards[rank], read)
        held = {
            name: count
            for name, count in counts.items()
            if ".experts." in name and bool(count.any())
        }
        experts = range(EXPERTS) if plan == "tp" else (range(2), range(2, 4), range(4, 5))[rank]
        part = slice(rank * 16, rank * 16 + 16) if plan == "tp" else slice(0, FEATURES)
        wanted = {}
        for layer in range(2):
            for expert in experts:
                for linear in ("gate_proj", "up_proj", "down_proj"):
                    shape = (64, FEATURES) if linear == "down_proj" else (FEATURES, 64)
                    mask = torch.zeros(shape)
                    mask[(slice(None), part) if linear == "down_proj" else part] = 1
                    wanted[f"model.layers.{layer}.mlp.experts.{expert}.{linear}.weight"] = mask
        assert held.keys() == wanted.keys()
        assert all(torch.equal(held[name], wanted[name]) for name in wanted)


def _drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def _change(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


def _one_more(tensors: Tensors) -> None:
    tensors[f"{LAYER}.{EXPERTS}.up_proj.weight"] = tensors[f"{LAYER}.0.up_proj.weight"].clone()


def _both(tensors: Tensors) -> None:
    held = dict(tensors)
    stack(tensors)
    tensors |= {name: tensor.clone() for name, tensor in held.items()}


def _stack_of_more(tensors: Tensors) -> None:
    stack(tensors)
    tensors[f"{LAYER}.down_proj"] = tensors[f"{LAYER}.down_proj"].repeat(2, 1, 1)


FAULTS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "an expert less": (_drop(f"{LAYER}.4.up_proj.weight"), rf"lacks .*{LAYER}\.4\.up_proj\.weight"),
    "an expert more": (_one_more, rf"does not have: {LAYER}\.5\.up_proj\.weight"),
    "both": (_both, r"does not have: model\.layers\.0\.mlp\.experts\.0.* and 29 more"),
    "another shape": (
        _change(f"{LAYER}.2.down_proj.weight", lambda tensor: tensor[:, :-1]),
        rf"shape of the tensor {LAYER}\.2\.down_proj\.weight",
    ),
    "the shape of another linear": (
        _change(f"{LAYER}.2.down_proj.weight", lambda tensor: tensor.T),
        rf"shape of the tensor {LAYER}\.2\.down_proj\.weight",
    ),
    "integers": (
        _change(f"{LAYER}.1.gate_proj.weight", lambda tensor: tensor.to(torch.int8)),
        rf"{LAYER}\.1\.gate_proj\.weight must have a floating-point dtype",
    ),
    "several dtypes": (
        _change(f"{LAYER}.1.up_proj.weight", torch.Tensor.bfloat16),
        rf"{LAYER}\.0\.gate_proj\.weight and {LAYER}\.1\.up_proj\.weight must have the same dtype",
    ),
    "stacks of more experts": (_stack_of_more, rf"shape of the tensor {LAYER}\.down_proj"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name: str, tmp_path: Path) -> None:
    change, message = FAULTS[name]
    mixture().save_pretrained(tmp_path)
    rewritten(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        tpcompile.compile(tmp_path, simulate=True, backend="torch")


@pytest.mark.parametrize("stacked", [False, True], ids=["one by one", "stacked"])
def test_the_text_model_of_a_checkpoint_with_a_vision_model(stacked: bool, tmp_path: Path) -> None:
    eager = mixture("qwen3_5_moe_text", layer_types=["full_attention"] * 2)
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    config = Qwen3_5MoeConfig(
        text_config=eager.config.to_dict(), vision_config={**vision, "out_hidden_size": 64}
    )
    whole: Any = Qwen3_5MoeForConditionalGeneration(config)
    whole.save_pretrained(tmp_path)
    eager.save_pretrained(tmp_path / "text")
    text = load_file(tmp_path / "text" / SINGLE)
    if stacked:
        stack(text)

    def replace(tensors: Tensors) -> None:
        vision = {
            name: tensor for name, tensor in tensors.items() if name.startswith("model.visual.")
        }
        tensors.clear()
        tensors.update(vision)
        for name, tensor in text.items():
            tensors[name.replace("model.", "model.language_model.", 1)] = tensor

    rewritten(tmp_path, replace)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3_5_moe"
    with tpcompile.compile(tmp_path, tp=2, simulate=True, backend="torch") as model:
        assert relative_error(logits_of(model), logits_of(eager)) < TOLERANCE


def test_random_weights_of_a_preset_are_those_of_its_stacked_tensors(tmp_path: Path) -> None:
    """Ranks draw the same experts, whichever they hold."""
    config = mixture().config
    states = []
    for tp, plan in ((1, "tp"), (3, "tp"), (3, "ep")):
        with tpcompile.compile(
            config,
            random_weights=3,
            tp=tp,
            simulate=True,
            backend="torch",
            pipeline=pipeline(plan, tp),
        ) as model:
            states.append(model.state_dict())
            model.save_pretrained(tmp_path / f"{plan}{tp}")
    first, *sharded = states
    assert not torch.equal(first[f"{LAYER}.down_proj"][0], first[f"{LAYER}.down_proj"][1])
    for other in sharded:
        assert all(torch.equal(tensor, other[name]) for name, tensor in first.items())
    with tpcompile.compile(tmp_path / "ep3", simulate=True, backend="torch") as model:
        assert all(torch.equal(tensor, first[name]) for name, tensor in model.state_dict().items())
