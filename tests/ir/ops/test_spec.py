"""Each op declares a rule, a cost, a reference and arguments, and its fake agrees with it."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.ir.ranks import infer, operand, random, run, whole_numbers
from tpcompile.ir.ops import (
    ADD_RESIDUAL,
    ADD_RMS_NORM,
    ALL_GATHER,
    ALL_REDUCE,
    ALL_REDUCE_RESIDUAL,
    ARGMAX,
    ATTENTION,
    ATTENTION_REDUCE,
    CACHED_ATTENTION,
    CAUSAL_CONV,
    DELTA_DECAY,
    DELTA_STEP,
    DELTA_STEP_APART,
    EMBEDDING,
    EXPERTS,
    GATED_ATTENTION_REDUCE,
    GATED_DELTA_RULE,
    GATED_RMS_NORM,
    LINEAR,
    LINEAR_RESIDUAL,
    NORM_EXPERTS,
    NORM_LINEAR,
    NORM_MLPS,
    NORM_MLPS_APART,
    NORM_Q_K_V_ROPE_APPEND,
    NORM_QKV_ROPE_APPEND,
    PAGED_ATTENTION,
    PARTIAL_ATTENTION,
    REDISTRIBUTE,
    REDUCE_SCATTER,
    RESUMED_CONV,
    RESUMED_DELTA_RULE,
    RMS_NORM,
    ROPE,
    ROPE_PAIRS,
    ROTARY,
    SHARED_EXPERT,
    SIGMOID_GATE,
    SPECS,
    SWIGLU,
    TABLES,
    TOP_EXPERTS,
    VOCAB_EMBEDDING,
    Cost,
    op_name,
    spec_of,
)
from tpcompile.ir.ops.spec import local_bytes, numel
from tpcompile.ir.roles import CacheOf, QueriesOf, SpansOf, StatesOf
from tpcompile.ir.types import ValueType

aten = torch.ops.aten
X = random(4, 6)
IDS = operand(torch.tensor([2, 0]))
HEADS, TABLE = random(4, 2, 6), random(4, 6, seed=1)
STARTS = operand(torch.tensor([0, 1, 4]))
CACHE = random(3, 2, 8, 1, 6).in_role(CacheOf(2))
QUERIES = HEADS.in_role(QueriesOf(1, 2))
SLOTS, LENGTHS = operand(torch.tensor([5, 0, 1, 2])), operand(torch.tensor([2, 3]))
BLOCKS = operand(torch.tensor([[2, -1], [0, 1]]))
ONE_EACH = (
    operand(torch.tensor([[2, 3], [0, 1], [3, 1], [1, 0]])),
    operand(torch.tensor([3, 3, 4, 3])),
)
"""Tables and lengths of four sequences with one new token each; no span is empty."""
CONV = random(4, 6), random(6, 1, 3, seed=1), random(6, seed=2)
DELTA = (
    *(random(4, 1, 6), random(4, 1, 6, seed=1), HEADS),
    *(operand(-random(4, 2).whole.abs()), random(4, 2, seed=1)),
)
RESUMED = STARTS, LENGTHS, operand(torch.tensor([1, 0])), operand(torch.tensor([2, 0]))
"""The first sequence resumes from state 1, and the second is new."""
STEP = (
    *(random(4, 4), random(24, 1, 3), random(24), random(2, 6, 2, 24).in_role(StatesOf())),
    *(random(2), random(2, seed=1), random(2, 6, 2, 6, 6).in_role(StatesOf())),
    *(random(6), 1e-6, operand(torch.arange(5)), operand(torch.tensor([1, 4, 2, 3]))),
    *(operand(torch.tensor([0, 1, 1, 3])), operand(torch.tensor([4, 2, 0, 5])), 1),
)
"""A step of linear attention, after its projected inputs."""

CHOICES = random(4, 2), operand(torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1]]))
MIXTURE = *CHOICES, random(3, 10, 6), random(3, 6, 5)
"""The choices of four tokens, and three experts with five features."""

SAMPLES: dict[Any, tuple[Any, ...]] = {
    aten.view.default: (X, [2, 12]),
    aten.reshape.default: (X, [2, -1]),
    aten.transpose.int: (X, 0, 1),
    aten.unsqueeze.default: (X, 1),
    aten.select.int: (X, 0, 1),
    aten.slice.Tensor: (X, 1, 2, 5, 2),
    aten.squeeze.dim: (random(4, 1, 6), 1),
    aten.expand.default: (random(1, 6), [3, -1]),
    aten.cat.default: ([X, X], 1),
    aten.unflatten.int: (X, 1, [-1, 3]),
    aten.repeat_interleave.self_int: (random(3, 4, 6), 2, 1),
    aten.flatten.using_ints: (X, 0, 1),
    aten.split_with_sizes.default: (X, [4, 2], 1),
    aten.chunk.default: (random(4, 5), 2, 1),
    aten.index_select.default: (X, 0, IDS),
    aten.index.Tensor: (X, [None, IDS]),
    aten.contiguous.default: (X,),
    aten.alias.default: (X,),
    aten.clone.default: (X,),
    aten.dropout.default: (X, 0.5, False),
    aten.add.Tensor: (X, random(6)),
    aten.mul.Tensor: (X, random(4, 1)),
    aten.sub.Tensor: (X, random(6)),
    aten.div.Tensor: (X, 3.0),
    aten.stack.default: ([X, X], -1),
    aten.layer_norm.default: (X, [6], random(6), random(6, seed=1), 1e-6),
    aten.neg.default: (X,),
    aten.silu.default: (X,),
    aten.gelu.default: (X,),
    aten.relu.default: (X,),
    aten.tanh.default: (X,),
    aten.square.default: (X,),
    aten.rsqrt.default: (operand(X.whole.abs() + 1),),
    aten.pow.Tensor_Scalar: (X, 2),
    aten.exp.default: (X,),
    aten.sigmoid.default: (X,),
    aten.softplus.default: (X,),
    aten.to.dtype: (X, torch.bfloat16),
    aten.type_as.default: (X, operand(X.whole.bfloat16())),
    aten.mean.dim: (X, [-1], True),
    aten.softmax.int: (X, -1, torch.float32),
    aten.topk.default: (X, 2),
    aten.sum.dim_IntList: (X, [-1], True),
    TOP_EXPERTS: (X, 2, True),
    EXPERTS: (X, *MIXTURE),
    NORM_EXPERTS: (X, random(6), 1e-6, *MIXTURE),
    SHARED_EXPERT: (X, random(4, 5), random(6, 5), random(4, 1)),
    ADD_RESIDUAL: (X, random(4, 6, seed=1)),
    EMBEDDING: (X, IDS),
    LINEAR: (X, random(3, 6), random(3)),
    VOCAB_EMBEDDING: (X, IDS),
    RMS_NORM: (X, random(6), 1e-6),
    ADD_RMS_NORM: (X, random(4, 6, seed=1), random(6), 1e-6),
    ROPE: (HEADS, TABLE, TABLE),
    ROPE_PAIRS: (HEADS, TABLE, TABLE, True, False),
    GATED_RMS_NORM: (HEADS, random(4, 2, 6, seed=1), random(6), 1e-6),
    SWIGLU: (X, X),
    SIGMOID_GATE: (X, random(4, 6, seed=1)),
    CAUSAL_CONV: (*CONV, STARTS, 0),
    DELTA_DECAY: (X, random(6), random(6, seed=1)),
    GATED_DELTA_RULE: (*DELTA, STARTS, 0),
    RESUMED_CONV: (*CONV, random(2, 3, 2, 6).in_role(StatesOf()), *RESUMED, 1),
    RESUMED_DELTA_RULE: (*DELTA, random(2, 3, 2, 6, 6).in_role(StatesOf()), *RESUMED, 1),
    DELTA_STEP: (random(4, 36), *STEP),
    DELTA_STEP_APART: (random(4, 24), random(4, 12, seed=1), *STEP),
    ATTENTION: (HEADS, random(4, 1, 6), random(4, 1, 6), STARTS, 0.5, 2, 0),
    PAGED_ATTENTION: (
        *(HEADS, random(4, 1, 6), random(4, 1, 6), CACHE, STARTS, SLOTS, BLOCKS, LENGTHS),
        *(0.5, 2, 1, 2),
    ),
    NORM_QKV_ROPE_APPEND: (
        *(X, random(6), 1e-6, random(24, 6), random(24), random(6), None, 1e-6),
        *(TABLE, TABLE, CACHE, SLOTS, 1, 2, (2, 1, 1)),
    ),
    NORM_Q_K_V_ROPE_APPEND: (
        *(X, random(6), 1e-6, random(12, 6), random(6, 6), random(6, 6)),
        *(random(12), None, random(6), None, random(6), 1e-6),
        *(TABLE, TABLE, CACHE, SLOTS, 1, 2),
    ),
    CACHED_ATTENTION: (QUERIES, CACHE, *ONE_EACH, 0.5, 2, 1, 2),
    PARTIAL_ATTENTION: (QUERIES, CACHE, *ONE_EACH, 0.5, None, 1, 2, 2),
    ATTENTION_REDUCE: (
        random(4, 2, 3, 6).in_role(SpansOf("values", 1, 2, 3)),
        random(4, 2, 3).in_role(SpansOf("lse", 1, 2, 3)),
        torch.float32,
    ),
    GATED_ATTENTION_REDUCE: (
        random(4, 2, 3, 6).in_role(SpansOf("values", 1, 2, 3)),
        random(4, 2, 3).in_role(SpansOf("lse", 1, 2, 3)),
        torch.float32,
        random(4, 12),
    ),
    LINEAR_RESIDUAL: (X, random(3, 6), None, random(4, 3)),
    NORM_LINEAR: (X, random(6), 1e-6, random(3, 6)),
    **dict.fromkeys(NORM_MLPS.values(), (X, random(6), 1e-6, random(8, 6))),
    **dict.fromkeys(
        NORM_MLPS_APART.values(),
        (X, random(6), 1e-6, random(4, 6), random(4, 6, seed=1), None, random(4)),
    ),
    ARGMAX: (X,),
    REDISTRIBUTE: (X,),
    ALL_REDUCE: (whole_numbers(4, 6).partial(),),
    ALL_REDUCE_RESIDUAL: (whole_numbers(4, 6).partial(), whole_numbers(4, 6, seed=1)),
    ALL_GATHER: (X, 0),
    REDUCE_SCATTER: (whole_numbers(4, 6).partial(), 1),
}
"""Operands of all computing ops; gather and scatter, which need a split, are tested separately."""

NOT_RUN = {aten.sym_size.int, operator.getitem, ROTARY, TABLES, aten.div_.Tensor}
"""Ops tested elsewhere: an extent, a tuple item, the markers of rotary tables, and a division in
place, which changes its operand."""

APART = {ALL_GATHER, REDUCE_SCATTER}
COMPUTED = [target for target in SAMPLES if target not in APART]
OURS = [target for target in SPECS if SPECS[target].name.startswith("tpc.")]
CUSTOM = [target for target in OURS if target in SAMPLES]


def tensors(arguments: Any) -> Any:
    if isinstance(arguments, list | tuple):
        return type(arguments)(tensors(argument) for argument in arguments)
    return getattr(arguments, "whole", arguments)


@pytest.mark.parametrize("target", SPECS, ids=lambda target: SPECS[target].name)
def test_every_op_is_declared_whole(target: Any) -> None:
    spec = SPECS[target]
    assert spec.target is target
    assert (spec.name and "." in spec.name) or target is operator.getitem
    assert all(map(callable, (spec.rule, spec.cost, spec.reference)))
    assert spec.argument_names and len(set(spec.argument_names)) == len(spec.argument_names)
    assert set(spec.keyword_only) <= set(spec.argument_names)
    if hasattr(target, "_schema"):
        assert spec.argument_names == tuple(a.name for a in target._schema.arguments)
    if target in OURS and target is not ROTARY:
        assert target.namespace == "tpc"
        assert torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "Meta")


def test_every_op_has_a_sample() -> None:
    assert set(SAMPLES) | NOT_RUN == set(SPECS)
    assert len({spec.name for spec in SPECS.values()}) == len(SPECS) - 1, "rotary has two targets"


@pytest.mark.parametrize("target", COMPUTED, ids=lambda target: SPECS[target].name)
def test_the_rule_s_shape_and_dtype_are_the_op_s(target: Any) -> None:
    run(target, *SAMPLES[target], ranks=2).assert_sound(exact=True)


@pytest.mark.parametrize("target", SAMPLES, ids=lambda target: SPECS[target].name)
def test_the_fake_has_the_shape_and_dtype_of_the_reference(target: Any) -> None:
    arguments = tensors(SAMPLES[target])
    output = target(*arguments)
    with FakeTensorMode() as mode:
        faked = [_fake(mode, argument) for argument in arguments]
        fake = target(*faked)
    several = isinstance(output, list | tuple)
    for real, imagined in zip(*((output, fake) if several else ([output], [fake])), strict=True):
        assert (real.shape, real.dtype) == (imagined.shape, imagined.dtype)


def _fake(mode: FakeTensorMode, argument: Any) -> Any:
    if isinstance(argument, list):
        return [_fake(mode, item) for item in argument]
    return mode.from_tensor(argument) if isinstance(argument, torch.Tensor) else argument


@pytest.mark.parametrize("target", CUSTOM, ids=lambda target: SPECS[target].name)
def test_torch_finds_our_ops_well_made(target: Any) -> None:
    """Torch's checks of schemas and fakes pass: no aliasing, no mutation but of a KV cache."""
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(target, tuple(tensors(SAMPLES[target])), test_utils=checks)


@pytest.mark.parametrize("target", CUSTOM, ids=lambda target: SPECS[target].name)
def test_the_reference_is_what_runs(target: Any) -> None:
    arguments = tensors(SAMPLES[target])
    actual, expected = target(*arguments), SPECS[target].reference(*arguments)
    for first, second in zip(*map(_listed, (actual, expected)), strict=True):
        assert torch.equal(first, second)


def _listed(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


@pytest.mark.parametrize("target", COMPUTED, ids=lambda target: SPECS[target].name)
def test_every_op_has_a_cost(target: Any) -> None:
    arguments = SAMPLES[target]
    flat = [item for argument in arguments for item in _listed(argument)]
    operands = [item.kind for item in flat if hasattr(item, "kind")]
    kind: Any = infer(target, *arguments)
    cost = SPECS[target].cost(kind, operands, 0)
    assert isinstance(cost, Cost)
    assert min(cost.flops, cost.memory_bytes, cost.wire_bytes) >= 0


def test_costs_count_a_rank_s_part() -> None:
    kinds = [value.kind for value in (X, random(8, 6))]
    result = ValueType((4, 8), torch.float32)
    cost = SPECS[LINEAR].cost(result, kinds, 0)
    assert cost.flops == 2 * 8 * 6
    assert cost.memory_bytes == 4 * (4 * 6 + 8 * 6 + 4 * 8)
    assert numel(("T", 3, 2)) == 6
    assert local_bytes(ValueType(("T", 3), torch.bfloat16), 0) == 6


def test_arguments_are_bound_by_name_with_their_defaults() -> None:
    spec = SPECS[aten.mean.dim]
    assert spec.bind((1, [0]), {"dtype": None}) == {
        "self": 1,
        "dim": [0],
        "keepdim": False,
        "dtype": None,
    }
    assert list(SPECS[ATTENTION].bind(range(7), {})) == [
        "q",
        "k",
        "v",
        "starts",
        "scale",
        "window",
        "layer",
        "kv_heads",
    ]
    assert spec.keyword_only == ("dtype",)


def test_nodes_and_their_specs() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    known, leaf = graph.call_function(LINEAR, (x, x)), graph.call_module("rotary", (x,))
    unknown = [
        graph.call_function(aten.mish.default, (x,)),
        graph.call_module("other", (x,)),
        graph.call_method("relu", (x,)),
        graph.call_function(torch.nn.functional.relu, (x,)),
    ]
    assert spec_of(known) is SPECS[LINEAR] and spec_of(leaf) is SPECS[ROTARY]
    assert spec_of(x) is None
    assert [spec_of(node) for node in unknown] == [None] * 4
    assert [op_name(node) for node in unknown] == ["aten.mish", "other", "relu", "relu"]
