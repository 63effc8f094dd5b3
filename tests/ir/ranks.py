"""Run one op on simulated ranks: distribute operands and reassemble results by their types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx

from tpcompile.ir.checker import Checker
from tpcompile.ir.info import GraphInfo
from tpcompile.ir.layout import AnyLayout, TokenLayout
from tpcompile.ir.ops import SPECS, RuleError
from tpcompile.ir.ops.collectives import to_whole
from tpcompile.ir.roles import Role
from tpcompile.ir.simulate import run_ranks
from tpcompile.ir.types import PARTIAL, REPLICATE, AnyType, Dim, Partial, Shard, ValueType


@dataclass(frozen=True)
class Operand:
    """A whole value and the type that describes its placement."""

    whole: torch.Tensor
    kind: ValueType

    def sharded(self, dim: int, layout: AnyLayout) -> Operand:
        return Operand(self.whole, self.kind.sharded(dim, layout))

    def in_role(self, role: Role | None) -> Operand:
        return Operand(self.whole, self.kind.in_role(role))

    def partial(self) -> Operand:
        return Operand(self.whole, self.kind.placed(PARTIAL))


def operand(whole: torch.Tensor, symbols: Sequence[str | None] = ()) -> Operand:
    """Return a replicated operand; `symbols` names its symbolic extents."""
    names = [*symbols, *[None] * (whole.dim() - len(symbols))]
    shape: list[Dim] = [
        extent if name is None else name for extent, name in zip(whole.shape, names, strict=True)
    ]
    return Operand(whole, ValueType(tuple(shape), whole.dtype))


def random(*shape: int, symbols: Sequence[str | None] = (), seed: int = 0) -> Operand:
    generator = torch.Generator().manual_seed(seed)
    return operand(torch.randn(shape, generator=generator), symbols)


def whole_numbers(*shape: int, symbols: Sequence[str | None] = (), seed: int = 0) -> Operand:
    """Return small integers as floats, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-4, 5, shape, generator=generator).float()
    return operand(values, symbols)


def deal(value: Operand, ranks: int) -> list[torch.Tensor]:
    """Return each rank's part of an operand."""
    whole, placement = value.whole, value.kind.placement
    if isinstance(placement, Partial):
        generator = torch.Generator().manual_seed(1)
        shape = (ranks - 1, *whole.shape)
        terms = list(torch.randint(-9, 10, shape, generator=generator).to(whole.dtype))
        return [*terms, whole - sum(terms, torch.zeros_like(whole))]
    if not isinstance(placement, Shard):
        return [whole.clone() for _ in range(ranks)]
    dim, layout = placement.dim, placement.layout
    if isinstance(layout, TokenLayout):
        bounds = [layout.run(rank, whole.shape[dim]) for rank in range(ranks)]
        return [whole.narrow(dim, start, stop - start) for start, stop in bounds]
    return [
        torch.cat([whole.narrow(dim, a, b - a) for a, b in layout.intervals(rank)], dim)
        for rank in range(ranks)
    ]


def infer(target: Any, *args: Any, **kwargs: Any) -> AnyType:
    """Infer the type of the result, or raise the rule's error."""
    return Checker().infer(_graph(target, args, kwargs)[1])


@dataclass(frozen=True)
class Outcome:
    """A result: its type, each rank's part, and the op's result on whole operands."""

    kind: AnyType
    ranks: list[Any]
    expected: Any

    def whole(self) -> Any:
        if isinstance(self.kind, tuple):
            columns = zip(*self.ranks, strict=True)
            return [to_whole(v, k) for v, k in zip(columns, self.kind, strict=True)]
        assert isinstance(self.kind, ValueType)
        return to_whole(self.ranks, self.kind)

    def assert_sound(self, *, exact: bool = False) -> None:
        """Assert that shapes, dtype and placement match the type, and values match the op's."""
        kinds = self.kind if isinstance(self.kind, tuple) else (self.kind,)
        columns = zip(*self.ranks, strict=True) if isinstance(self.kind, tuple) else [self.ranks]
        expected = self.expected if isinstance(self.kind, tuple) else [self.expected]
        wholes = self.whole() if isinstance(self.kind, tuple) else [self.whole()]
        for kind, values, wanted, whole in zip(kinds, columns, expected, wholes, strict=True):
            assert isinstance(kind, ValueType)
            _assert_shape(kind.shape, wanted.shape)
            assert kind.dtype == wanted.dtype
            for rank, value in enumerate(values):
                _assert_shape(kind.local_shape(rank), value.shape)
                assert value.dtype == kind.dtype
                assert bool(torch.isfinite(value).all())
            if kind.placement == REPLICATE:
                assert all(torch.equal(value, values[0]) for value in values)
            assert whole.shape == wanted.shape
            if exact:
                assert torch.equal(whole, wanted)
            else:
                torch.testing.assert_close(whole, wanted, rtol=1e-5, atol=1e-5)


def run(target: Any, *args: Any, ranks: int, **kwargs: Any) -> Outcome:
    """Run the op on all ranks and on the whole operands."""
    graph, node, operands = _graph(target, args, kwargs)
    node.meta["type"] = kind = Checker().infer(node)
    graph.output(node)
    gm = fx.GraphModule({name: value.whole for name, value in operands.items()}, graph)
    gm.meta["tpcompile"] = GraphInfo("one op", ranks, ())
    values = run_ranks(gm, {}, {n: deal(o, ranks) for n, o in operands.items()}, _no_rotary)
    spec = SPECS[target]
    bound = spec.bind(_whole(args), _whole(kwargs))
    return Outcome(kind, values[node], spec.call(bound))


def sound_or_refused(target: Any, *args: Any, **kwargs: Any) -> None:
    """Assert that the rule refuses, or that its type is sound."""
    if refusal(target, *args, **kwargs) is None:
        run(target, *args, ranks=2, **kwargs).assert_sound()


def refusal(target: Any, *args: Any, **kwargs: Any) -> str | None:
    """Return the rule that refuses the operands, or None."""
    try:
        infer(target, *args, **kwargs)
    except RuleError as error:
        return error.rule
    return None


def refused(rule: str, target: Any, *args: Any, **kwargs: Any) -> RuleError:
    """Assert that this rule refuses the operands, and return the error."""
    with pytest.raises(RuleError) as caught:
        infer(target, *args, **kwargs)
    assert caught.value.rule == rule, caught.value
    assert caught.value.got and caught.value.expected
    return caught.value


def _graph(
    target: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[fx.Graph, fx.Node, dict[str, Operand]]:
    graph, operands = fx.Graph(), dict[str, Operand]()

    def place(arg: Any) -> Any:
        if isinstance(arg, list | tuple):
            return [place(item) for item in arg]
        if not isinstance(arg, Operand):
            return arg
        name = f"operand_{len(operands)}"
        operands[name] = arg
        node = graph.get_attr(name)
        node.meta["type"] = arg.kind
        return node

    placed = tuple(map(place, args))
    named = {name: place(arg) for name, arg in kwargs.items()}
    return graph, graph.call_function(target, placed, named), operands


def _whole(arg: Any) -> Any:
    if isinstance(arg, dict):
        return {name: _whole(item) for name, item in arg.items()}
    if isinstance(arg, list | tuple):
        return [_whole(item) for item in arg]
    return arg.whole if isinstance(arg, Operand) else arg


def _assert_shape(kind: Sequence[Dim], shape: Sequence[int]) -> None:
    """Assert that all known extents match; symbolic extents may have any size."""
    assert len(kind) == len(shape), (kind, shape)
    for dim, extent in zip(kind, shape, strict=True):
        assert isinstance(dim, str) or dim == extent, (kind, shape)


def _no_rotary(*args: Any) -> Any:
    raise AssertionError("one op needs no tables")
