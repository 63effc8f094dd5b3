"""Experts with weights of few bits: made while loading, or read from checkpoints of all methods."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import tpcompile
from tests.captures import captured_once as capture
from tests.compressed import floats, group, write_compressed
from tests.expert_models import (
    IDS,
    VOCABULARY,
    logits_of,
    mixture,
    mixture_config,
    pipeline,
    sharding,
)
from tests.float8 import write_fp8
from tests.models import TOLERANCE, relative_error
from tests.packed import write_awq, write_gptq
from tests.runtime.test_experts import count_reads
from tpcompile.backends.torch_tp import functions
from tpcompile.checkpoint_files import SINGLE
from tpcompile.errors import CompileError, UnsupportedError
from tpcompile.frontend import Captured
from tpcompile.ir.meta import parameter_of, parameters
from tpcompile.ir.pieces import evaluate
from tpcompile.ir.simulate import logits_of as logits_of_graph
from tpcompile.ir.simulate import materialise, run_ranks, whole_value
from tpcompile.passes import run_passes
from tpcompile.runtime.kv.packing import pack
from tpcompile.runtime.weights import opened, weights_of

FEATURES, EXPERTS = 96, 5
CHANGES: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "moe_intermediate_size": FEATURES,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 1,
}
SHARED = {
    "model_type": "qwen2_moe",
    "shared_expert_intermediate_size": 64,
    "decoder_sparse_step": 1,
}
ROUTER = r"re:.*mlp.gate$"
KINDS: dict[str, Callable[[Path], Any]] = {
    "int4 in groups of 32 with offsets": lambda directory: write_compressed(
        directory, group(4, 32, symmetric=False), ignore=["lm_head", ROUTER], **CHANGES
    ),
    "int4 in groups of 48": lambda directory: write_compressed(
        directory,
        group(4, 48, targets=["re:.*down_proj"]),
        group(4, 32, targets=["re:.*(gate|up)_proj"]),
        **CHANGES,
    ),
    "int8 in rows, a shared expert": lambda directory: write_compressed(
        directory,
        group(8, layout="int-quantized"),
        ignore=["lm_head", ROUTER, "re:.*shared_expert_gate"],
        **CHANGES | SHARED,
    ),
    "a layer in few bits": lambda directory: write_compressed(
        directory,
        group(8, 32),
        ignore=["lm_head", r"re:.*layers\.0\.mlp\.experts.*"],
        **CHANGES | {"num_hidden_layers": 2},
    ),
    "8-bit floating point in blocks": partial(write_fp8, block=(40, 32), **CHANGES),
    "compressed floats in blocks": lambda directory: write_compressed(
        directory, floats("block", (32, 32)), **CHANGES
    ),
    "gptq": partial(write_gptq, columns=32, **CHANGES),
    "gptq, symmetric, in 8 bits": partial(
        write_gptq,
        columns=48,
        bits=8,
        symmetric=True,
        **CHANGES | {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3},
    ),
    "awq, a gate in 16 bits": partial(
        write_awq, columns=32, left=("shared_expert_gate",), **CHANGES | SHARED
    ),
}
PLANS = [(1, "tp"), (2, "tp"), (3, "tp"), (3, "ep")]


def simulated(captured: Captured, directory: Path, tp: int, plan: str) -> torch.Tensor:
    """Return the logits of `IDS` on simulated ranks."""
    graph, _ = run_passes(captured.graph, sharding(plan, tp))
    inputs = pack(IDS, torch.ones_like(IDS)).inputs()
    with opened(weights_of(captured, str(directory), None)) as read, torch.inference_mode():
        weights = materialise(graph, read)
        logits = logits_of_graph(run_ranks(graph, inputs, weights, captured.rotary.fresh()))
    return logits[0].view(*IDS.shape, -1)


@pytest.mark.parametrize("name", KINDS)
def test_a_checkpoint_is_its_values(name: str, tmp_path: Path) -> None:
    """Groups are cut at tp=2, or at tp=3 those of 48 columns."""
    truth = KINDS[name](tmp_path)
    wanted = logits_of(truth.float())
    captured = capture(str(tmp_path), dtype=torch.float32)
    assert any(
        tensor.format is not None and len(tensor.shape) == 3 for tensor in captured.tensors.values()
    )
    with opened(weights_of(captured, str(tmp_path), None)) as read:
        for key, parameter in truth.named_parameters():
            assert torch.equal(whole_value(captured.tensors[key], read, torch.float32), parameter)
    for tp, plan in PLANS:
        logits = simulated(captured, tmp_path, tp, plan)
        assert relative_error(logits, wanted) < TOLERANCE, (tp, plan)
    options: dict[str, Any] = {"backend": "torch", "simulate": True, "dtype": "float32"}
    with tpcompile.compile(tmp_path, tp=2, pipeline=pipeline("tp", 2), **options) as model:
        assert relative_error(logits_of(model), wanted) < TOLERANCE
        model.save_pretrained(tmp_path / "saved")
    saved, stored = (load_file(path / SINGLE) for path in (tmp_path / "saved", tmp_path))
    assert saved.keys() == stored.keys() - {"model.layers.0.mlp.gate.bias"}
    for key, tensor in saved.items():
        assert torch.equal(tensor, stored[key].to(tensor.dtype)), key


@pytest.mark.parametrize(("tp", "plan"), PLANS[1:])
def test_a_rank_reads_exactly_its_part(tp: int, plan: str, tmp_path: Path) -> None:
    write_compressed(tmp_path, group(4, 32, symmetric=False), **CHANGES)
    captured = capture(str(tmp_path))
    graph, _ = run_passes(captured.graph, sharding(plan, tp))
    for rank in range(tp):
        counts: dict[str, torch.Tensor] = {}
        with opened(weights_of(captured, str(tmp_path), None)) as read:
            count_reads(read, counts)
            for node in parameters(graph.graph):
                for _, recipe in parameter_of(node).components(rank):
                    evaluate(recipe, read)
        held = {
            name: count
            for name, count in counts.items()
            if ".experts." in name and bool(count.any())
        }
        width = FEATURES // tp
        low, high = (rank * width, (rank + 1) * width) if plan == "tp" else (0, FEATURES)
        experts = range(EXPERTS) if plan == "tp" else (range(2), range(2, 4), range(4, 5))[rank]
        words, groups = slice(low // 8, high // 8), slice(low // 32, -(-high // 32))
        everything = slice(None)
        parts = {
            "weight_packed": ((FEATURES, 8), (slice(low, high),), (64, 12), (everything, words)),
            "weight_scale": ((FEATURES, 2), (slice(low, high),), (64, 3), (everything, groups)),
            "weight_zero_point": ((12, 2), (words,), (8, 3), (everything, groups)),
        }
        wanted = {}
        for expert in experts:
            for linear in ("gate_proj", "up_proj", "down_proj"):
                for part, (shape, box, of_down, box_of_down) in parts.items():
                    down = linear == "down_proj"
                    mask = torch.zeros(of_down if down else shape)
                    mask[box_of_down if down else box] = 1
                    wanted[f"model.layers.0.mlp.experts.{expert}.{linear}.{part}"] = mask
        assert held.keys() == wanted.keys()
        assert all(torch.equal(held[name], wanted[name]) for name in wanted)


def _exchanged(tensors: dict[str, torch.Tensor], end: str, left: str, right: str) -> None:
    path = "model.layers.0.mlp.experts"
    first, second = f"{path}.{left}.{end}", f"{path}.{right}.{end}"
    tensors[first], tensors[second] = tensors[second], tensors[first]


@pytest.mark.parametrize(
    ("end", "left", "right"),
    [
        ("weight_scale", "1.up_proj", "2.up_proj"),
        ("weight_packed", "0.gate_proj", "0.up_proj"),
        ("weight_packed", "3.down_proj", "4.down_proj"),
    ],
)
def test_numbers_depend_on_the_tensors_of_each_expert(
    end: str, left: str, right: str, tmp_path: Path
) -> None:
    """The tests above see tensors that are exchanged."""
    truth = write_compressed(tmp_path, group(4, 32), **CHANGES)
    tensors = load_file(tmp_path / SINGLE)
    _exchanged(tensors, end, left, right)
    save_file(tensors, tmp_path / SINGLE, {"format": "pt"})
    logits = simulated(capture(str(tmp_path)), tmp_path, 1, "tp")
    assert relative_error(logits, logits_of(truth)) > 100 * TOLERANCE


@pytest.mark.parametrize("weights", ["int8:row", "int4:32"])
def test_weights_made_while_loading(weights: str, tmp_path: Path) -> None:
    """They are those of the checkpoint that `quantize` writes, which transformers reads."""
    eager = mixture("qwen2_moe", moe_intermediate_size=FEATURES)
    eager.save_pretrained(tmp_path / "plain")
    directory = tmp_path / "made"
    tpcompile.quantize(str(tmp_path / "plain"), weights, directory, head="keep")
    tensors = load_file(directory / SINGLE)
    gates = [
        name for name in tensors if name.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))
    ]
    assert len(gates) == 4 and all(torch.equal(tensors[n], eager.get_parameter(n)) for n in gates)
    assert f"model.layers.0.mlp.experts.{EXPERTS - 1}.up_proj.weight_packed" in tensors
    ignored = json.loads((directory / "config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.1.mlp.gate" in ignored
    load: Any = AutoModelForCausalLM.from_pretrained
    wanted = logits_of(load(directory, dtype=torch.float32).eval())
    assert relative_error(logits_of(eager), wanted) > 100 * TOLERANCE
    options: dict[str, Any] = {"backend": "torch", "simulate": True, "head": "keep"}
    for source in (str(tmp_path / "plain"), eager):
        for tp, plan in PLANS[1:2] if source is eager else PLANS[1:]:
            with tpcompile.compile(
                source, tp=tp, weights=weights, pipeline=pipeline(plan, tp), **options
            ) as model:
                assert relative_error(logits_of(model), wanted) < TOLERANCE
                state = model.state_dict()
            assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())


def test_modules_decode_the_chosen_experts_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    whole = functions.DecodedExperts.__getitem__

    def counting(self: Any, place: int) -> Any:
        tensor = whole(self, place)
        decoded.append((place, tuple(tensor.shape)))
        return tensor

    monkeypatch.setattr(functions.DecodedExperts, "__getitem__", counting)
    config = mixture_config(num_experts=64, num_experts_per_tok=1, num_hidden_layers=1)
    with tpcompile.compile(
        config, weights="int4:16", random_weights=0, simulate=True, backend="torch"
    ) as model:
        logits_of(model)
    experts = [place for place, _ in decoded[::2]]
    assert 1 < len(experts) <= IDS.numel() and experts == sorted(set(experts))
    assert [shape for _, shape in decoded] == [(96, 64), (64, 48)] * len(experts)


@pytest.mark.parametrize(("tp", "plan"), PLANS[1:])
def test_inputs_rounded_to_int8(tp: int, plan: str, tmp_path: Path) -> None:
    """Modules compute what simulated ranks compute."""
    mixture(moe_intermediate_size=FEATURES, num_hidden_layers=1).save_pretrained(tmp_path)
    tpcompile.quantize(str(tmp_path), "int4:32", tmp_path / "made", head="keep")
    captured = capture(str(tmp_path / "made"), rounds=True)
    wanted = simulated(captured, tmp_path / "made", tp, plan)
    plain = simulated(capture(str(tmp_path / "made")), tmp_path / "made", tp, plan)
    assert 10 * TOLERANCE < relative_error(wanted, plain) < 0.3
    with tpcompile.compile(
        tmp_path / "made",
        tp=tp,
        activations="int8",
        simulate=True,
        backend="torch",
        pipeline=pipeline(plan, tp),
    ) as model:
        assert relative_error(logits_of(model), wanted) < TOLERANCE


def test_random_weights_in_few_bits() -> None:
    """They are the same for every plan; only the experts of a rank are drawn."""
    config = mixture_config(moe_intermediate_size=FEATURES, num_hidden_layers=1)
    states = []
    for tp, plan in PLANS:
        with tpcompile.compile(
            config,
            weights="int4:32",
            random_weights=0,
            tp=tp,
            simulate=True,
            backend="torch",
            pipeline=pipeline(plan, tp),
        ) as model:
            states.append(model.state_dict())
    first, *sharded = states
    assert all(torch.equal(tensor, other[n]) for other in sharded for n, tensor in first.items())
    scales = [first[f"model.layers.0.mlp.experts.{e}.up_proj.weight_scale"] for e in (0, 1)]
    assert not torch.equal(*scales)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "an expert left out": (
        {"ignore": ["lm_head", "model.layers.0.mlp.experts.3.up_proj"]},
        r"stored alike.*experts\.3\.up_proj\.weight.*values, beside int4:32",
    ),
    "gate alone": (
        {"ignore": ["lm_head", r"re:.*experts\.\d+\.gate_proj"]},
        r"stored alike.*experts\.0\.up_proj\.weight.*int4:32:f32, beside values",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_experts_of_several_formats_are_refused(name: str, tmp_path: Path) -> None:
    changes, message = FAULTS[name]
    write_compressed(tmp_path, group(4, 32), **CHANGES, **changes)
    with pytest.raises(UnsupportedError, match=f"(?s){message}"):
        capture(str(tmp_path))


def test_a_missing_scale_is_named(tmp_path: Path) -> None:
    write_compressed(tmp_path, group(4, 32), **CHANGES)
    tensors = load_file(tmp_path / SINGLE)
    name = "model.layers.0.mlp.experts.3.up_proj.weight_scale"
    del tensors[name]
    save_file(tensors, tmp_path / SINGLE, {"format": "pt"})
    with pytest.raises(CompileError, match=name.replace(".", r"\.")):
        tpcompile.compile(tmp_path, simulate=True, backend="torch")
