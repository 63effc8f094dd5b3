"""Patterns bind matching nodes, and report where and why others do not match."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from tests.passes.graphs import GraphBuilder
from tpcompile.ir.meta import Origin
from tpcompile.ir.ops import LINEAR, RMS_NORM
from tpcompile.ir.pattern import UNKNOWN, Optional
from tpcompile.rewriting.pattern import (
    Call,
    Maybe,
    MissError,
    Number,
    Value,
    check,
    match,
    match_calls,
)

aten = torch.ops.aten
ADD, MUL, NEG = aten.add.Tensor, aten.mul.Tensor, aten.neg.default


@pytest.fixture
def builder() -> GraphBuilder:
    return GraphBuilder()


@pytest.fixture
def x(builder: GraphBuilder) -> fx.Node:
    return builder.input("x", "T", 4)


@pytest.fixture
def y(builder: GraphBuilder) -> fx.Node:
    return builder.input("y", "T", 4)


def _miss(pattern: Any, node: fx.Node) -> MissError:
    with pytest.raises(MissError) as miss:
        match(pattern, node)
    return miss.value


def test_values_and_numbers_are_bound(builder: GraphBuilder, x: fx.Node) -> None:
    node = builder.call(ADD, x, 2.5)
    assert match(Call(ADD, (Value("a"), Number("b"))), node) == {"a": x, "b": 2.5}


def test_a_name_means_one_node(builder: GraphBuilder, x: fx.Node, y: fx.Node) -> None:
    square = Call(MUL, (Value("a"), Value("a")))
    assert match(square, builder.call(MUL, x, x)) == {"a": x}
    miss = _miss(square, builder.call(MUL, x, y))
    assert (miss.node, miss.reason) == (y, "a is already bound to %x")


@pytest.mark.parametrize("swapped", [False, True])
def test_either_order_of_what_commutes(
    swapped: bool, builder: GraphBuilder, x: fx.Node, y: fx.Node
) -> None:
    pair = [builder.call(NEG, x), y]
    node = builder.call(MUL, *(pair[::-1] if swapped else pair))
    pattern = Call(MUL, (Call(NEG, (Value("a"),)), Value("b")), commutes=True)
    assert match(pattern, node) == {"a": x, "b": y}


def test_order_matters_where_nothing_commutes(
    builder: GraphBuilder, x: fx.Node, y: fx.Node
) -> None:
    pattern = Call(MUL, (Call(NEG, (Value("a"),)), Value("b")))
    miss = _miss(pattern, builder.call(MUL, y, builder.call(NEG, x)))
    assert miss.reason == "expected aten.neg, got %y"


def test_the_order_not_taken_binds_nothing(builder: GraphBuilder, x: fx.Node, y: fx.Node) -> None:
    """A failed order of operands leaves no bindings: `a` is first bound to y, then to x."""
    pattern = Call(MUL, (Value("a"), Call(NEG, (Value("a"),))), commutes=True)
    assert match(pattern, builder.call(MUL, builder.call(NEG, y), y)) == {"a": y}
    _miss(pattern, builder.call(MUL, builder.call(NEG, y), x))


def test_of_two_orders_the_nearer_miss_is_told(
    builder: GraphBuilder, x: fx.Node, y: fx.Node
) -> None:
    inner = Call(NEG, (Call(NEG, (Value("a"),)),))
    node = builder.call(MUL, x, builder.call(NEG, y))
    miss = _miss(Call(MUL, (inner, Value("b")), commutes=True), node)
    assert (miss.node, miss.depth) == (y, 2)


@pytest.mark.parametrize("there", [False, True])
def test_maybe_is_there_or_not(there: bool, builder: GraphBuilder, x: fx.Node) -> None:
    inner = builder.call(NEG, x)
    node = builder.call(aten.to.dtype, inner, torch.float32) if there else inner
    assert match(Maybe(aten.to.dtype, Call(NEG, (Value("a"),))), node) == {"a": x}


@pytest.mark.parametrize("there", [False, True])
def test_without_its_optional_operand_a_call_is_absent(
    there: bool, builder: GraphBuilder, x: fx.Node, y: fx.Node
) -> None:
    inner = builder.call(NEG, x)
    pattern = Optional(
        Call(ADD, (Call(NEG, (Value("a"),)), Value("b", optional=True)), commutes=True)
    )
    node = builder.call(ADD, y, inner) if there else inner
    assert match(pattern, node) == {"a": x, "b": y if there else None}
    miss = _miss(pattern, builder.call(ADD, y, y))
    assert miss.reason == "expected aten.neg, got %y"


def test_an_absent_value_is_bound_to_none(builder: GraphBuilder, x: fx.Node) -> None:
    linear = builder.linear(x, "w", 4, 4)
    operands = Value("x"), Value("weight"), Value("bias", optional=True)
    assert match(Call(LINEAR, operands), linear)["bias"] is None
    miss = _miss(Call(LINEAR, (*operands[:2], Value("bias"))), linear)
    assert miss.reason == "argument bias: expected a value bias, got None"


def test_a_call_that_occurs_twice_is_one_node(builder: GraphBuilder, x: fx.Node) -> None:
    shared = Call(NEG, (Value("a"),))
    pattern = Call(MUL, (shared, shared))
    first, second = builder.call(NEG, x), builder.call(NEG, x)
    square = builder.call(MUL, first, first)
    assert match_calls(pattern, square) == ({"a": x}, [square, first])
    assert _miss(pattern, builder.call(MUL, first, second)).reason == "expected %neg, got %neg_1"


def test_a_number_that_occurs_twice_is_the_same(builder: GraphBuilder, x: fx.Node) -> None:
    node = builder.call(ADD, builder.call(ADD, x, 2.0), 3.0)
    assert _miss(_sums(Number("n")), node).reason == (
        "argument other: the same argument has two values, got [2.0, 3.0]"
    )
    miss = _miss(_sums(Number("n", "its terms must be equal")), node)
    assert (miss.node, miss.reason) == (node, "its terms must be equal, got [2.0, 3.0]")
    assert miss.depth > 50
    assert match(_sums(UNKNOWN), node) == {"a": x}


def _sums(number: Any) -> Call:
    return Call(ADD, (Call(ADD, (Value("a"), number)), number))


def test_what_is_no_linear_or_norm_is_said_in_words(builder: GraphBuilder, x: fx.Node) -> None:
    norm = Call(RMS_NORM, (Value("a"), Value("scale"), Number("eps")))
    pattern = Call(LINEAR, (norm, Value("weight"), Value("bias", optional=True)))
    linear = builder.linear(x, "w", 4, 4)
    miss = _miss(pattern, linear)
    assert (miss.node, miss.reason) == (linear, "its input %x is not an RMS norm")
    miss = _miss(pattern, x)
    assert (miss.node, miss.reason) == (x, "it is not a linear")


def test_lists_have_the_same_length(builder: GraphBuilder, x: fx.Node, y: fx.Node) -> None:
    node = builder.call(aten.cat.default, [x, y], 1)
    assert match(Call(aten.cat.default, ([Value("a"), Value("b")], 1)), node) == {"a": x, "b": y}
    miss = _miss(Call(aten.cat.default, ([Value("a")], 1)), node)
    assert miss.reason == "argument tensors: expected a list of 1, got [x, y]"
    miss = _miss(Call(aten.cat.default, ([Value("a"), Value("b")], -1)), node)
    assert miss.reason == "argument dim: expected -1, got 1"


def test_a_value_is_no_number_and_a_number_no_value(
    builder: GraphBuilder, x: fx.Node, y: fx.Node
) -> None:
    miss = _miss(Call(ADD, (Value("a"), Number("b"))), builder.call(ADD, x, y))
    assert miss.reason == "expected a number b, got %y"
    miss = _miss(Call(ADD, (Value("a"), Value("b"))), builder.call(ADD, x, 1.0))
    assert miss.reason == "argument other: expected a value b, got 1.0"


def test_missing_arguments_are_told(builder: GraphBuilder, x: fx.Node) -> None:
    miss = _miss(Call(NEG, (Value("a"), Number("b"))), builder.call(NEG, x))
    assert miss.reason == "expected 2 arguments, got 1"


def test_the_depth_counts_the_calls_that_fit(builder: GraphBuilder, x: fx.Node) -> None:
    node = builder.call(NEG, builder.call(NEG, builder.call(ADD, x, 1.0)))
    deep = Call(NEG, (Call(NEG, (Call(NEG, (Value("a"),)),)),))
    assert _miss(deep, node).depth == 2
    assert _miss(Call(MUL, (Value("a"),)), node).depth == 0


def test_a_miss_says_where(builder: GraphBuilder, x: fx.Node) -> None:
    node = builder.call(ADD, x, 1.0)
    node.meta["origin"] = Origin("model.norm", "/some/where/modeling.py", 7)
    miss = _miss(Call(NEG, (Value("a"),)), node)
    assert str(miss) == "%add (model.norm modeling.py:7): expected aten.neg, got aten.add"


def test_a_check_is_nearer_than_any_shape(builder: GraphBuilder, x: fx.Node) -> None:
    check(True, x, "nothing")
    with pytest.raises(MissError, match="too small") as miss:
        check(False, x, "too small")
    assert miss.value.depth > 50
