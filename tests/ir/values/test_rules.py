"""The rule of each op is put to numbers: its expression beside the op, on the same operands."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

from tests.ir.values.evaluation import Numbers
from tpcompile.ir import ops
from tpcompile.ir.ops import SPECS
from tpcompile.ir.ops.norm import NORM_BEFORE_ROUNDING
from tpcompile.ir.values.attending import ONE_NEW_TOKEN, SPANS_MERGED, WITHOUT_PAST
from tpcompile.ir.values.expressions import Expressions
from tpcompile.ir.values.recurrent import FROM_THE_START
from tpcompile.ir.values.scope import Rewrite, Scope
from tpcompile.ir.values.value import Value, own_indices

aten, tpc = torch.ops.aten, torch.ops.tpc
Call = Callable[..., Any]
Sample = Callable[[Call, Any], Any]
"""Function that makes calls of operands; it is run on tensors, and on expressions."""

_REWRITES = frozenset(
    {WITHOUT_PAST, ONE_NEW_TOKEN, SPANS_MERGED, FROM_THE_START, NORM_BEFORE_ROUNDING}
)
_SHAPES = {
    "x": (4, 8),
    "y": (4, 8),
    "norm": (8,),
    "weight": (6, 8),
    "weight2": (6, 8),
    "both": (12, 8),
    "bias": (6,),
    "square": (8, 8),
    "bias8": (8,),
    "q": (4, 4, 4),
    "k": (4, 2, 4),
    "v": (4, 2, 4),
    "qkv": (32, 8),
    "q_rows": (16, 8),
    "k_rows": (8, 8),
    "head_norm": (4,),
    "cos": (4, 4),
    "sin": (4, 4),
    "cache": (1, 2, 8, 2, 4),
    "values": (4, 4, 1, 4),
    "gate": (4, 16),
    "logits": (4, 3),
    "scores": (4, 2),
    "gate_up": (3, 12, 8),
    "down": (3, 8, 6),
    "column": (4, 1),
    "z": (4, 2, 3),
    "flat_z": (4, 6),
    "projected": (4, 10),
    "projected_z": (4, 16),
    "gates": (4, 4),
    "taps": (10, 1, 3),
    "channel_bias": (10,),
    "rate": (2,),
    "offset": (2,),
    "decay": (4, 2),
    "share": (4, 2),
    "delta_k": (4, 1, 2),
    "delta_q": (4, 1, 2),
    "tails": (1, 4, 2, 10),
    "states": (1, 4, 2, 2, 3),
    "value_norm": (3,),
    "batch": (1, 4, 8),
}
_INTEGERS = {
    "ids": [3, 0, 5, 3],
    "rows": [2, 0],
    "chosen": [[2, 0], [1, 2], [0, 1], [1, 0]],
    "positions": [0, 1, 2, 7],
    "starts": [0, 1, 2, 3, 4],
    "two": [0, 3, 4],
    "slots": [0, 2, 4, 6],
    "tables": [[0], [1], [2], [3]],
    "lengths": [1, 1, 1, 1],
    "states_of": [2, 0, 3, 1],
}


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tensors = {name: torch.rand(shape, generator=generator) for name, shape in _SHAPES.items()}
    return tensors | {name: torch.tensor(numbers) for name, numbers in _INTEGERS.items()}


def _op(target: Any, *args: Any) -> Sample:
    """Return a sample of one call; the names of operands begin with %."""

    def operand(t: Any, arg: Any) -> Any:
        if isinstance(arg, list):
            return [operand(t, item) for item in arg]
        return getattr(t, arg[1:]) if isinstance(arg, str) and arg[0] == "%" else arg

    return lambda call, t: call(target, *(operand(t, arg) for arg in args))


def _then(first: Sample, target: Any, *names: Any) -> Sample:
    """Return a sample of a call that reads what another one has written."""

    def run(call: Call, t: Any) -> Any:
        result = first(call, t)
        return call(target, result, *(getattr(t, n) if isinstance(n, str) else n for n in names))

    return run


_PAGED = ("%q", "%k", "%v", "%cache", "%starts", "%slots", "%tables", "%lengths", 0.5, None, 0, 2)
_HEADS = ("%cos", "%sin", "%cache", "%slots", 0, 2)
_APPEND = _op(
    *(tpc.norm_qkv_rope_append.default, "%x", "%norm", 1e-3, "%qkv", None),
    *("%head_norm", "%head_norm", 1e-3, *_HEADS, [4, 2, 2]),
)
_APPEND_APART = _op(
    *(tpc.norm_q_k_v_rope_append.default, "%x", "%norm", 1e-3, "%q_rows", "%k_rows", "%k_rows"),
    *(None, None, "%bias8", None, None, 1e-3, *_HEADS),
)
_CACHED = ("cache", "tables", "lengths", 0.5, None, 0, 2)
_SPANS = _then(_APPEND, tpc.partial_attention.default, *_CACHED, 1)
_SEQUENCES = ("%starts", "%lengths", "%states_of", "%states_of", 0)
_DELTA = ("%delta_q", "%delta_k", "%z", "%decay", "%share")
_STEP = ("%taps", "%channel_bias", "%tails", "%rate", "%offset", "%states", "%value_norm", 1e-3)


def _merged(target: Any, *more: str) -> Sample:
    def run(call: Call, t: Any) -> Any:
        values, lse = _SPANS(call, t)
        return call(target, values, lse, torch.float32, *(getattr(t, name) for name in more))

    return run


def _interleaved(call: Call, t: Any) -> Any:
    """Attend with interleaved heads, whose products have another order."""
    q, k = (call(tpc.rope.default, heads, t.cos, t.sin, True) for heads in (t.q, t.k))
    return call(tpc.attention.default, q, k, t.v, t.two, 0.5, None, 0)


SAMPLES: dict[Any, list[Sample]] = {
    aten.view.default: [_op(aten.view.default, "%x", [4, 2, 4])],
    aten.reshape.default: [_op(aten.reshape.default, "%q", [4, -1])],
    aten.transpose.int: [_op(aten.transpose.int, "%q", 0, 1)],
    aten.unsqueeze.default: [_op(aten.unsqueeze.default, "%x", 1)],
    aten.squeeze.dim: [_op(aten.squeeze.dim, "%batch", 0)],
    aten.expand.default: [_op(aten.expand.default, "%batch", [3, 4, 8])],
    aten.unflatten.int: [_op(aten.unflatten.int, "%x", 1, [-1, 2])],
    aten.flatten.using_ints: [_op(aten.flatten.using_ints, "%q", 1, 2)],
    aten.repeat_interleave.self_int: [_op(aten.repeat_interleave.self_int, "%x", 2, -1)],
    aten.dropout.default: [_op(aten.dropout.default, "%x", 0.5, False)],
    aten.sym_size.int: [_op(aten.sym_size.int, "%x", 1)],
    aten.contiguous.default: [_op(aten.contiguous.default, "%x")],
    aten.alias.default: [_op(aten.alias.default, "%x")],
    aten.clone.default: [_op(aten.clone.default, "%x")],
    operator.getitem: [_op(operator.getitem, ["%x", "%weight"], 1)],
    aten.select.int: [_op(aten.select.int, "%q", 1, 2)],
    aten.slice.Tensor: [_op(aten.slice.Tensor, "%x", 1, 1, 7, 3)],
    aten.cat.default: [_op(aten.cat.default, ["%x", "%y", "%x"], -1)],
    aten.stack.default: [_op(aten.stack.default, ["%x", "%y"], 1)],
    aten.split_with_sizes.default: [_op(aten.split_with_sizes.default, "%x", [3, 5], 1)],
    aten.chunk.default: [_op(aten.chunk.default, "%x", 2, 1)],
    aten.index_select.default: [_op(aten.index_select.default, "%x", 0, "%rows")],
    aten.index.Tensor: [_op(aten.index.Tensor, "%x", ["%rows"])],
    aten.linear.default: [
        _op(aten.linear.default, "%x", "%weight"),
        _op(aten.linear.default, "%x", "%weight", "%bias"),
    ],
    tpc.argmax.default: [_op(tpc.argmax.default, "%x")],
    tpc.attention.default: [
        _op(tpc.attention.default, "%q", "%k", "%v", "%two", 0.5, None, 0),
        _op(tpc.attention.default, "%q", "%k", "%v", "%two", 0.5, 2, 0),
    ],
    **{
        target: [_op(target, "%x")]
        for target in (
            tpc.redistribute.default,
            tpc.all_reduce.default,
            aten.neg.default,
            aten.silu.default,
            aten.relu.default,
            aten.tanh.default,
            aten.square.default,
            aten.rsqrt.default,
            aten.exp.default,
            aten.sigmoid.default,
            aten.softplus.default,
            aten.gelu.default,
        )
    },
    tpc.all_gather.default: [_op(tpc.all_gather.default, "%x", 0)],
    tpc.reduce_scatter.default: [_op(tpc.reduce_scatter.default, "%x", 1)],
    **{
        target: [_op(target, "%x", "%y"), _op(target, "%x", "%norm")]
        for target in (
            aten.add.Tensor,
            aten.sub.Tensor,
            aten.mul.Tensor,
            aten.div.Tensor,
            aten.div_.Tensor,
        )
    },
    aten.pow.Tensor_Scalar: [_op(aten.pow.Tensor_Scalar, "%x", 3)],
    aten.to.dtype: [_op(aten.to.dtype, "%x", torch.bfloat16)],
    aten.type_as.default: [_op(aten.type_as.default, "%x", "%y")],
    tpc.swiglu.default: [_op(tpc.swiglu.default, "%x", "%y")],
    tpc.sigmoid_gate.default: [_op(tpc.sigmoid_gate.default, "%x", "%y")],
    tpc.paged_attention.default: [_op(tpc.paged_attention.default, *_PAGED)],
    tpc.cached_attention.default: [_then(_APPEND, tpc.cached_attention.default, *_CACHED)],
    tpc.norm_qkv_rope_append.default: [_APPEND],
    tpc.norm_q_k_v_rope_append.default: [
        _APPEND_APART,
        _then(_APPEND_APART, tpc.cached_attention.default, *_CACHED),
    ],
    tpc.partial_attention.default: [_merged(tpc.attention_reduce.default)],
    tpc.attention_reduce.default: [_merged(tpc.attention_reduce.default)],
    tpc.gated_attention_reduce.default: [_merged(tpc.gated_attention_reduce.default, "gate")],
    aten.mean.dim: [_op(aten.mean.dim, "%x", [-1], True)],
    aten.layer_norm.default: [_op(aten.layer_norm.default, "%x", [8], "%norm", None, 1e-3)],
    tpc.rms_norm.default: [
        _op(tpc.rms_norm.default, "%x", "%norm", 1e-3, zero_centered)
        for zero_centered in (False, True)
    ],
    tpc.add_rms_norm.default: [_op(tpc.add_rms_norm.default, "%x", "%y", "%norm", 1e-3)],
    tpc.gated_rms_norm.default: [_op(tpc.gated_rms_norm.default, "%x", "%y", "%norm", 1e-3)],
    tpc.norm_linear.default: [_op(tpc.norm_linear.default, "%x", "%norm", 1e-3, "%weight")],
    **{
        target: [_op(target, "%x", "%norm", 1e-3, "%both" if "gate_up" in spec.name else "%weight")]
        for target, spec in SPECS.items()
        if spec.name.startswith(("tpc.norm_gate_up_", "tpc.norm_up_"))
    },
    **{
        target: [_op(target, "%x", "%norm", 1e-3, "%weight", "%weight2")]
        for target, spec in SPECS.items()
        if spec.name.startswith("tpc.norm_gate_and_up_")
    },
    tpc.causal_conv.default: [
        _op(tpc.causal_conv.default, "%projected", "%taps", "%channel_bias", "%two", 0)
    ],
    tpc.delta_decay.default: [_op(tpc.delta_decay.default, "%decay", "%rate", "%offset")],
    tpc.gated_delta_rule.default: [_op(tpc.gated_delta_rule.default, *_DELTA, "%two", 0)],
    tpc.resumed_conv.default: [
        _op(tpc.resumed_conv.default, "%projected", "%taps", None, "%tails", *_SEQUENCES)
    ],
    tpc.resumed_delta_rule.default: [
        _op(tpc.resumed_delta_rule.default, *_DELTA, "%states", *_SEQUENCES)
    ],
    tpc.delta_step.default: [
        _op(tpc.delta_step.default, "%projected_z", "%gates", *_STEP, *_SEQUENCES)
    ],
    tpc.delta_step_apart.default: [
        _op(tpc.delta_step_apart.default, "%projected", "%flat_z", "%gates", *_STEP, *_SEQUENCES)
    ],
    aten.softmax.int: [_op(aten.softmax.int, "%logits", -1)],
    aten.topk.default: [_op(aten.topk.default, "%logits", 2)],
    aten.sum.dim_IntList: [_op(aten.sum.dim_IntList, "%x", [-1], True)],
    tpc.top_experts.default: [
        _op(tpc.top_experts.default, "%logits", 2, normalized) for normalized in (False, True)
    ],
    tpc.experts.default: [
        _op(tpc.experts.default, "%x", "%scores", "%chosen", "%gate_up", "%down")
    ],
    tpc.norm_experts.default: [
        _op(
            *(tpc.norm_experts.default, "%x", "%norm", 1e-3),
            *("%scores", "%chosen", "%gate_up", "%down"),
        )
    ],
    tpc.shared_expert.default: [_op(tpc.shared_expert.default, "%x", "%y", "%square", "%column")],
    tpc.add_residual.default: [_op(tpc.add_residual.default, "%x", "%y")],
    tpc.rotary.default: [_op(tpc.rotary.default, "%positions", 4, torch.float32)],
    ops.ROTARY: [_op(ops.ROTARY, "%positions", 4, torch.float32)],
    tpc.rope.default: [_op(tpc.rope.default, "%q", "%cos", "%sin"), _interleaved],
    tpc.rope_pairs.default: [
        _op(tpc.rope_pairs.default, "%q", "%cos", "%sin", halves, False) for halves in (False, True)
    ],
    tpc.linear_residual.default: [
        _op(tpc.linear_residual.default, "%x", "%square", "%bias8", "%y")
    ],
    tpc.all_reduce_residual.default: [_op(tpc.all_reduce_residual.default, "%x", "%y", "%bias8")],
    aten.embedding.default: [_op(aten.embedding.default, "%weight", "%ids")],
    tpc.vocab_embedding.default: [_op(tpc.vocab_embedding.default, "%weight", "%ids")],
}

_CALLED = (tpc.attention.default, tpc.causal_conv.default, tpc.gated_delta_rule.default)
_ROTARY = LlamaRotaryEmbedding(LlamaConfig(hidden_size=16, num_attention_heads=4))


def test_each_rule_has_numbers() -> None:
    with_rules = {
        target
        for target, spec in SPECS.items()
        if spec.value is not None and spec.rule.__module__.startswith("tpcompile.")
    }
    assert with_rules - set(SAMPLES) == set()


@pytest.mark.parametrize("target", SAMPLES, ids=str)
def test_the_numbers_of_a_rule_are_those_of_the_op(target: Any) -> None:
    for sample in SAMPLES[target]:
        called: list[Any] = []
        expected = sample(_compute(called), SimpleNamespace(**_tensors()))
        assert target in called
        _check(_numbers(sample, _REWRITES), expected)


def test_a_norm_of_a_rounded_sum() -> None:
    for sample in SAMPLES[tpc.add_rms_norm.default]:
        expected = sample(_compute([]), SimpleNamespace(**_tensors()))
        _check(_numbers(sample, _REWRITES - {NORM_BEFORE_ROUNDING}), expected)


def _check(numbers: Any, expected: Any) -> None:
    for actual, wanted in zip(_results(numbers), _results(expected), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)


def _compute(called: list[Any]) -> Call:
    def compute(target: Any, *args: Any) -> Any:
        called.append(target)
        if target in (ops.ROTARY, tpc.rotary.default):
            return _rotary(*args)
        return target(*args)

    return compute


def _rotary(positions: torch.Tensor, width: int, dtype: torch.dtype) -> Any:
    cos, sin = _ROTARY(torch.zeros(1, dtype=dtype), positions[None])
    return cos[0], sin[0]


def _numbers(sample: Sample, rewrites: frozenset[Rewrite]) -> Any:
    """Return the numbers of the expressions of a sample's results, under these rewrites."""
    tensors = _tensors()
    expressions = Expressions()
    terms = expressions.terms

    def value(name: str, tensor: torch.Tensor) -> Value:
        source = terms.source("input", (name, None), tensor.dtype)
        shape = tuple(tensor.shape)
        return Value(shape, tensor.dtype, terms.read(source, own_indices(shape)))

    operands = {name: value(name, tensor) for name, tensor in tensors.items()}
    scope = Scope(terms, lambda *call: expressions._interpret(scope, *call), rewrites, operands)
    outputs = sample(
        lambda target, *args: scope.interpret(target, tuple(map(_fixed, args))),
        SimpleNamespace(**operands),
    )
    calls = {SPECS[target].name: _in_layer(target) for target in _CALLED}
    calls |= {"tpc.experts": SPECS[tpc.experts.default].reference, "tpc.rotary": _rotary}
    numbers = Numbers(tensors.__getitem__, tensors, calls, 4)
    results = [numbers.of(item) if isinstance(item, Value) else item for item in _results(outputs)]
    return tuple(results)


def _fixed(arg: Any) -> Any:
    return tuple(arg) if isinstance(arg, list) else arg


def _in_layer(target: Any) -> Call:
    return lambda **bound: SPECS[target].reference(**bound, layer=0)


def _results(outputs: Any) -> tuple[Any, ...]:
    return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)
