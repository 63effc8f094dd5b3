"""A composite op is its body: on tensors, on types, as a pattern, and in what follows from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.ir.ranks import operand, random, refusal, run
from tpcompile.ir.layout import Layout, even_runs
from tpcompile.ir.ops import (
    ALL_REDUCE_RESIDUAL,
    LINEAR,
    LINEAR_RESIDUAL,
    NORM_GATE_UP_SWIGLU,
    NORM_QKV_ROPE_APPEND,
    RMS_NORM,
    SPECS,
    SWIGLU,
    VOCAB_EMBEDDING,
    Cost,
    RuleError,
)
from tpcompile.ir.ops.composite import Part, composite, known, optional
from tpcompile.ir.pattern import UNKNOWN, Call, Number, Optional, Value
from tpcompile.ir.types import PARTIAL, Partial, ValueType

aten = torch.ops.aten
Declare = Callable[..., Any]
X = ValueType(("T", 4), torch.float32)
WEIGHT = ValueType((6, 4), torch.float32)


@pytest.fixture
def declare() -> Iterator[Declare]:
    """Return `composite`; the ops that it declares are forgotten afterwards."""
    before = set(SPECS)
    yield composite
    for target in set(SPECS) - before:
        del SPECS[target]


def scaled_rows(
    weight: torch.Tensor, ids: torch.Tensor, scale: float, start: int = 0
) -> torch.Tensor:
    """Look up rows and multiply them, with its own name for the first row."""
    rows: torch.Tensor = VOCAB_EMBEDDING(weight, ids, start) * scale
    return rows


def test_the_schema_is_the_signature() -> None:
    """Names, order and defaults are those of the body; functions are not part of the schema."""
    assert str(NORM_QKV_ROPE_APPEND._schema) == (
        "tpc::norm_qkv_rope_append(Tensor x, Tensor norm, float eps, Tensor weight, Tensor? bias, "
        "Tensor? q_norm, Tensor? k_norm, float head_eps, Tensor cos, Tensor sin, "
        "Tensor(a!) cache, Tensor slots, int layer, int block, int[] heads, "
        "bool interleaved=False, bool zero_centered=False) -> Tensor"
    )
    assert str(SWIGLU._schema) == "tpc::swiglu(Tensor gate, Tensor up) -> Tensor"
    assert str(ALL_REDUCE_RESIDUAL._schema).endswith(
        "Tensor residual, Tensor? bias=None) -> Tensor"
    )


def test_all_that_follows_from_a_body(declare: Declare) -> None:
    """Results, types, refusals, costs and rank-local arguments follow from the calls."""
    target = declare(scaled_rows)
    table, ids = random(10, 4), operand(torch.tensor([3, 9, 0]))
    rows = Layout("vocab", 10, 1, even_runs(10, 2))
    outcome = run(target, table.sharded(0, rows), ids, 3.0, ranks=2)
    outcome.assert_sound(exact=True)
    assert isinstance(outcome.kind, ValueType) and isinstance(outcome.kind.placement, Partial)
    assert refusal(target, table, ids, 3.0, 1) == "vocab-offset"
    kinds = [table.sharded(0, rows).kind, ids.kind]
    local = SPECS[target].localize
    assert local is not None
    arguments = [local(None, r, weight=kinds[0], ids=kinds[1], scale=3.0, start=0) for r in (0, 1)]
    assert arguments == [{"start": 0}, {"start": 5}]
    assert SPECS[target].cost(outcome.kind, kinds, 0) == SPECS[VOCAB_EMBEDDING].cost(
        outcome.kind, kinds, 0
    )


def test_the_pattern_is_the_calls() -> None:
    """Shared values are one call, what depends on types is unknown, and sums commute."""
    gate, up = SPECS[NORM_GATE_UP_SWIGLU].pattern.args
    assert (gate.args[1], up.args[1]) == (0, 1)
    split = gate.args[0]
    assert split is up.args[0] and split.target is aten.split_with_sizes.default
    linear, sizes, dim = split.args
    assert sizes == (UNKNOWN, UNKNOWN) and dim == 1
    assert linear.target is LINEAR
    assert linear.args[1:] == (Value("weight"), Value("bias", optional=True))
    assert linear.args[0].target is RMS_NORM
    centred = Number("zero_centered")
    assert linear.args[0].args == (Value("x"), Value("norm"), Number("eps"), centred)
    added = SPECS[LINEAR_RESIDUAL].pattern
    assert added.commutes and not added.args[1].commutes


def test_an_optional_call_is_one_in_the_pattern_too() -> None:
    queries, *_ = SPECS[NORM_QKV_ROPE_APPEND].pattern.args
    normed = queries.args[0]
    assert isinstance(normed, Optional) and normed.call.target is RMS_NORM
    assert normed.call.args[1] == Value("q_norm", optional=True)
    assert "same epsilon" in normed.call.args[2].unequal


def gelu_product(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = aten.gelu.default(x, approximate="tanh") * other
    return product


def test_options_of_a_call_are_put_in_order(declare: Declare) -> None:
    target = declare(gelu_product)
    assert SPECS[target].pattern.args[0].args == (Value("x"), "tanh")
    run(target, random(3, 4), random(3, 4), ranks=2).assert_sound(exact=True)


def test_a_tensor_must_be_one(declare: Declare) -> None:
    """Without any operand torch itself would be called, whose errors are not refusals."""
    target = declare(gelu_product, name="gelu_product_again")
    assert refusal(target, None, None) == refusal(target, random(3, 4), None) == "arguments"


def test_each_call_applies_the_rule_of_its_op(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(**_: object) -> None:
        raise RuleError("never", "a linear", "none")

    operands = (random(3, 4), random(6, 4), None, random(3, 6))
    assert refusal(LINEAR_RESIDUAL, *operands) is None
    monkeypatch.setitem(SPECS, LINEAR, replace(SPECS[LINEAR], rule=refusing))
    assert refusal(LINEAR_RESIDUAL, *operands) == "never"


def test_the_cost_is_that_of_products_and_operands() -> None:
    """Values between the calls cost nothing, and only products count."""
    norm = ValueType((4,), torch.float32)
    result = ValueType(("T", 3), torch.float32)
    cost = SPECS[NORM_GATE_UP_SWIGLU].cost(result, [X, norm, WEIGHT], 0)
    assert cost == Cost(flops=2 * 6 * 4, memory_bytes=4 * (4 + 4 + 24 + 3))
    half = WEIGHT.sharded(0, Layout("ffn", 6, 1, even_runs(6, 2)))
    assert SPECS[NORM_GATE_UP_SWIGLU].cost(result, [X, norm, half], 1).flops == 2 * 3 * 4
    assert SPECS[SWIGLU].cost(X, [X, X], 0) == Cost(flops=4, memory_bytes=3 * 16)


def test_a_part_runs_on_tensors_types_and_patterns(declare: Declare) -> None:
    def function(x: Any, count: int) -> Any:
        return x + count

    def rule(x: ValueType, count: int) -> ValueType:
        return x.placed(PARTIAL) if count > 1 else x

    def counted(x: torch.Tensor, count: int) -> torch.Tensor:
        result: torch.Tensor = part(x, count)
        return result

    part = Part(function, rule)
    spec = SPECS[declare(counted)]
    assert torch.equal(spec.reference(torch.ones(2), 1), torch.full((2,), 2.0))
    assert (spec.rule(x=X, count=1), spec.rule(x=X, count=2)) == (X, X.placed(PARTIAL))
    assert isinstance(spec.pattern, Call) and spec.pattern.target is part


def test_an_optional_operand_may_be_absent() -> None:
    x, other = torch.ones(2), torch.full((2,), 3.0)
    assert optional(aten.add.Tensor, x, None) is x
    assert torch.equal(optional(aten.add.Tensor, x, other), x + other)


def test_what_is_known_is_computed() -> None:
    def larger(first: int, second: int) -> int:
        return max(first, second)

    assert known(larger, 2, 3) == 3
    assert known(larger, UNKNOWN, 3) is UNKNOWN


def test_a_signature_that_no_schema_has_is_refused(declare: Declare) -> None:
    def text(x: torch.Tensor, word: str) -> torch.Tensor:
        return x

    with pytest.raises(TypeError, match="word"):
        declare(text)
