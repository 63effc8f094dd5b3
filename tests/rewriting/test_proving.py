"""Every pass is proved, and mistakes in real passes are refused by what they compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import fx

from tests.captures import captured_once
from tpcompile.ir.meta import operand
from tpcompile.ir.ops import ROPE, SWIGLU
from tpcompile.passes import (
    Pass,
    Report,
    cache_kv,
    fuse_add_norm,
    fuse_norm_linear,
    fuse_norm_qkv,
    parse_pipeline,
    raise_norm,
    raise_rope,
    raise_swiglu,
    run_passes,
    split_attention,
)
from tpcompile.passes.pipeline import for_ranks
from tpcompile.presets import preset
from tpcompile.rewriting import linears
from tpcompile.rewriting.manager import FailedPassError
from tpcompile.rewriting.rewrite import calls, insert

_SEQUENCE = (
    "canonicalize,split-heads,raise-norm,raise-gates,raise-rope,raise-swiglu,raise-experts,"
    "raise-attention,plan-sharding,shard-linears,kv-heads,vocab-parallel,insert-collectives,"
    "sequence-parallel,fuse-qkv,fuse-gate-up"
)
_PIPELINES = (
    "standard",
    "standard{interleaved=true}",
    "standard{kv=int8}",
    "decode",
    "decode{spans=2,block=4,interleaved=true}",
    _SEQUENCE,
)
_BIASED = {
    "model_type": "llama",
    "hidden_size": 96,
    "intermediate_size": 176,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "vocab_size": 1009,
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": False,
}


def _captured(name: str, dtype: torch.dtype = torch.float32) -> fx.GraphModule:
    from transformers import AutoConfig

    values: Any = _BIASED if name == "biased" else preset(name)
    return captured_once(AutoConfig.for_model(**values), dtype=dtype).graph


_MODELS = {
    "tiny-qwen2": torch.float32,
    "tiny-qwen3": torch.bfloat16,
    "tiny-qwen3-moe": torch.bfloat16,
    "biased": torch.bfloat16,
    "tiny-qwen3.5": torch.bfloat16,
    "tiny-qwen3.5-moe": torch.float32,
}


@pytest.mark.parametrize("name", _MODELS)
def test_every_pass_is_proved(name: str) -> None:
    rotated_in_part = "qwen3.5" in name
    for place, text in enumerate(_PIPELINES):
        if rotated_in_part and "interleaved" in text:
            continue
        passes = for_ranks(parse_pipeline(text), (1, 3, 2)[place % 3])
        _, stages = run_passes(_captured(name, _MODELS[name]), passes)
        assert not {stage.name: why for stage in stages if (why := stage.stats.unproved)}


def _swapped_gate_and_up(node: fx.Node, bindings: Any) -> fx.Node:
    return insert(node, SWIGLU, bindings["up"], bindings["gate"])


def _other_eps(right: Any) -> Callable[..., Any]:
    def operands(node: fx.Node, bindings: Any) -> Any:
        x, weight, eps = right(node, bindings)
        return x, weight, eps * 10

    return operands


def _without_rotation(node: fx.Node, op: Any, x: fx.Node, bindings: Any, *options: bool) -> fx.Node:
    return x


def _other_tables(right: Any) -> Callable[..., Any]:
    def rotation(node: fx.Node, op: Any, x: fx.Node, bindings: Any, *options: bool) -> Any:
        return right(
            node, op, x, {**bindings, "cos": bindings["sin"], "sin": bindings["cos"]}, *options
        )

    return rotation


def _next_part(right: Any) -> Callable[..., Any]:
    """Read the parts of keys and values, which are alike, in the other order."""

    def item(like: fx.Node, source: fx.Node, index: int, name: str) -> Any:
        return right(like, source, {1: 2, 2: 1}.get(index, index), name)

    return item


def _twice_the_first(right: Any) -> Callable[..., Any]:
    def terms(added: fx.Node, kind: Any) -> Any:
        x, residual = right(added, kind)
        return (x, x) if x.meta["type"] == residual.meta["type"] else (residual, x)

    return terms


def _with(name: str, value: Any) -> Callable[[Any], Callable[..., Any]]:
    """Change an argument of the op that a pass inserts."""

    def wrong(right: Any) -> Callable[..., Any]:
        def bound(like: fx.Node, target: Any, arguments: Any) -> Any:
            return right(
                like, target, {**arguments, name: value} if name in arguments else arguments
            )

        return bound

    return wrong


@dataclass(frozen=True)
class _Mistake:
    """A function of a pass, and a wrong one that is made from it."""

    module: Any
    function: str
    wrong: Callable[[Any], Callable[..., Any]]
    pipeline: str = "standard"


_MISTAKES = {
    "gate and up swapped": _Mistake(raise_swiglu, "_replacement", lambda _: _swapped_gate_and_up),
    "another eps": _Mistake(raise_norm, "_operands", _other_eps),
    "a rotation left out": _Mistake(raise_rope, "_rotation", lambda _: _without_rotation),
    "sine for cosine": _Mistake(raise_rope, "_rotation", _other_tables),
    "keys and values swapped": _Mistake(linears, "insert_item", _next_part),
    "a sum with itself": _Mistake(fuse_add_norm, "_terms", _twice_the_first),
    "another scale": _Mistake(split_attention, "insert_bound", _with("scale", 1.0), "decode"),
    "another window": _Mistake(cache_kv, "insert_bound", _with("window", 3)),
    "another eps of heads": _Mistake(
        fuse_norm_qkv, "insert_bound", _with("head_eps", 1e-3), "decode"
    ),
    "another eps of the head": _Mistake(
        fuse_norm_linear, "insert_bound", _with("eps", 1e-3), "decode"
    ),
}


@pytest.mark.parametrize("mistake", _MISTAKES)
def test_mistakes_in_passes_are_refused(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = _MISTAKES[mistake]
    right = getattr(case.module, case.function)
    monkeypatch.setattr(case.module, case.function, case.wrong(right))
    with pytest.raises(FailedPassError) as caught:
        run_passes(_captured("tiny-qwen3"), for_ranks(parse_pipeline(case.pipeline), 2))
    (problem,) = caught.value.problems
    assert problem.rule == "values"
    assert problem.expected.endswith(", as before the pass")
    wholes = problem.details or (problem.got, problem.expected)
    assert all(f"%{problem.node} = " in whole for whole in wholes)
    assert problem.got in wholes[-1] or problem.got in wholes[0]
    alone = mistake == "another eps of the head"
    assert ("nodes break this rule: " in str(problem)) is not alone
    assert "changes what the graph computes" in str(caught.value)


@dataclass(frozen=True)
class _Edit:
    """A pass of another package, with or without declared rewrites."""

    name: ClassVar[str] = "skip-rotation"

    def apply(self, gm: fx.GraphModule) -> Report:
        node = calls(gm, ROPE)[0]
        node.replace_all_uses_with(operand(node))
        gm.graph.erase_node(node)
        return Report(matches=1)


@dataclass(frozen=True)
class _Declared(_Edit):
    rewrites: ClassVar[tuple[Any, ...]] = ()


def _with_edit(edit: Pass) -> list[Pass]:
    return [
        *parse_pipeline("canonicalize,raise-norm,raise-rope,raise-swiglu,raise-attention"),
        edit,
    ]


def test_a_plugin_without_declaration_is_not_proved() -> None:
    _, stages = run_passes(_captured("tiny-qwen3"), _with_edit(_Edit()))
    assert "declares no rewrites" in stages[-1].stats.unproved
    assert not any(stage.stats.unproved for stage in stages[:-1])


def test_a_plugin_that_declares_its_rewrites_is_refused() -> None:
    with pytest.raises(FailedPassError, match="changes what the graph computes"):
        run_passes(_captured("tiny-qwen3"), _with_edit(_Declared()))


def test_a_message_names_the_node_and_both_expressions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raise_norm, "_operands", _other_eps(raise_norm._operands))
    with pytest.raises(FailedPassError) as caught:
        run_passes(_captured("tiny-qwen3"), parse_pipeline("canonicalize,raise-norm"))
    (problem,) = caught.value.problems
    assert problem.node == "l0_input_normed"
    assert problem.details == tuple(
        f"{when}%l0_input_normed = (%embedding[i, j] · rsqrt({eps} + mean(pow(%embedding[i, k], "
        "2)))) · model.layers.0.input_layernorm.weight[j]"
        for when, eps in (("before the pass: ", "1e-06"), ("after the pass:  ", "1e-05"))
    )
    assert (problem.got, problem.expected) == ("1e-05", "1e-06, as before the pass")
    assert problem.others[:2] == ("l0_q_normed", "l0_k_normed")
    last = "9 nodes break this rule: %l{0..1}_input_normed, %l{0..1}_q_normed, "
    assert str(problem).splitlines()[-1].strip().startswith(last)


def test_rewrites_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that round elsewhere, or add a cache, are refused without their declarations."""
    for name, kind, dtype in (
        ("biased", "shard-linears", torch.bfloat16),
        ("tiny-qwen3", "fuse-add-norm", torch.bfloat16),
        ("tiny-qwen3", "cache-kv", torch.float32),
        ("tiny-qwen3.5", "keep-states", torch.float32),
    ):
        passes = for_ranks(parse_pipeline("standard"), 2)
        wrong = next(current for current in passes if current.name == kind)
        with monkeypatch.context() as patched:
            patched.setattr(type(wrong), "rewrites", ())
            with pytest.raises(FailedPassError, match=f"The pass {kind}"):
                run_passes(_captured(name, dtype), passes)
