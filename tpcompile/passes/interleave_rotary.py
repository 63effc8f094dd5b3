"""Pass `interleave-rotary`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from tpcompile.errors import PassError
from tpcompile.ir.layout import Layout
from tpcompile.ir.meta import Parameter, operand, origin_of, parameter_of, set_parameter, value_type
from tpcompile.ir.ops import ATTENTION, LINEAR, PAGED_ATTENTION, RMS_NORM, ROPE, arguments_of
from tpcompile.ir.recipe import Permute
from tpcompile.ir.roles import Interleaved
from tpcompile.ir.text import format_node
from tpcompile.ir.values.attending import KEYS_IN_ANY_ORDER
from tpcompile.ir.values.scope import Rewrite
from tpcompile.passes.plan_sharding import PlanSharding
from tpcompile.rewriting.pattern import MissError
from tpcompile.rewriting.rewrite import Report
from tpcompile.rewriting.structure import bias_of, head_ops, weight_of

aten = torch.ops.aten


@dataclass(frozen=True)
class InterleaveRotary:
    """Make the two elements of each rotated pair adjacent, in queries and keys.

    %q = linear(%n, %wq)                 %q = linear(%n, %wq)    rows 0, half, 1, half + 1, … of
    %h = unflatten(%q, 1, [-1, 16])  →   %h = unflatten(%q, …)   each head of wq and of its bias
    %m = rms_norm(%h, %g)                %m = rms_norm(%h, %g)   the elements of g likewise
    %y = rope(%m, %cos, %sin)            %y = rope(%m, %cos, %sin, interleaved=True)

    Attention scores do not change, because queries and keys are permuted alike. The cache stores
    keys in the new order.
    """

    name: ClassVar[str] = "interleave-rotary"
    after: ClassVar[tuple[str, ...]] = PlanSharding.after
    rewrites: ClassVar[tuple[Rewrite, ...]] = (KEYS_IN_ANY_ORDER,)
    before: ClassVar[tuple[str, ...]] = ("fuse-qkv", "fuse-norm-qkv", "fuse-norm-linear")

    def apply(self, gm: fx.GraphModule) -> Report:
        report = Report()
        attentions = [n for n in gm.graph.nodes if n.target in (ATTENTION, PAGED_ATTENTION)]
        sides: dict[fx.Node, _Side] = {}
        for attention in attentions:
            try:
                pair = [_side(attention, operand(attention, place)) for place in (0, 1)]
            except MissError as miss:
                report.miss(miss)
                continue
            interleaved = {side.interleaved for side in pair}
            if len(interleaved) > 1:
                raise _refusal(
                    pair[1].nodes[0], "queries and keys are rotated in different layouts"
                )
            if interleaved == {False}:
                sides |= {side.nodes[0]: side for side in pair}
        _check_readers(sides, attentions)
        for node, width in _parameters(sides).items():
            set_parameter(node, _interleaved(parameter_of(node), width))
        for side in sides.values():
            _rotate_pairs(side)
            report.matches += 1
        done = any(_is_interleaved(node) for node in gm.graph.nodes)
        return report if done else report.require(gm, "attention to rotated heads")


@dataclass(frozen=True)
class _Side:
    """The chain of queries or keys from attention's operand back to the projection, inclusive."""

    nodes: tuple[fx.Node, ...]
    width: int

    @property
    def interleaved(self) -> bool:
        return any(map(_is_interleaved, self.nodes))

    @property
    def parameters(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        """The parameters with one element per element of a head, each with its reader."""
        *norms, linear = (node for node in self.nodes if node.target in (RMS_NORM, LINEAR))
        for norm in norms:
            yield operand(norm, 1), norm
        yield weight_of(linear), linear
        bias = bias_of(linear)
        if bias is not None:
            yield bias, linear


def _side(attention: fx.Node, rotated: fx.Node) -> _Side:
    chain = head_ops(rotated)
    rope = next((node for node in chain if node.target is ROPE), None)
    if rope is None:
        raise MissError(attention, f"%{rotated.name} is not rotated", len(chain))
    width, turned = value_type(rotated).shape[-1], value_type(operand(rope, 1)).shape[-1]
    if turned != width:
        part = f"only {turned} of the {width} elements of a head are rotated"
        raise MissError(attention, f"{part} in %{rotated.name}", len(chain))
    heads = chain[-1]
    linear = operand(heads) if heads.target is aten.unflatten.int else heads
    if linear.target is not LINEAR:
        hint = "Put interleave-rotary before fuse-qkv"
        raise _refusal(linear, "its rows must come from a separate linear", hint)
    assert isinstance(width, int)
    return _Side((*chain, linear), width)


def _is_interleaved(node: fx.Node) -> bool:
    bound = arguments_of(node) if node.target is ROPE else {}
    return bool(bound.get("interleaved"))


def _check_readers(sides: dict[fx.Node, _Side], attentions: list[fx.Node]) -> None:
    """Check that only attention reads the new order, and not as its values."""
    for side in sides.values():
        inside = {node: reader for reader, node in zip(side.nodes, side.nodes[1:], strict=False)}
        for node, reader in inside.items():
            for user in node.users:
                if user is not reader:
                    raise _refusal(node, f"%{user.name} also reads it")
        rotated = side.nodes[0]
        for user in rotated.users:
            if user not in attentions or rotated in user.args[2:]:
                raise _refusal(rotated, f"%{user.name} also reads it, and not as queries or keys")


def _parameters(sides: dict[fx.Node, _Side]) -> dict[fx.Node, int]:
    """Map each parameter to permute to the width of its heads."""
    readers = {(node, reader) for side in sides.values() for node, reader in side.parameters}
    widths: dict[fx.Node, int] = {}
    for side in sides.values():
        for node, _ in side.parameters:
            for user in node.users:
                if (node, user) not in readers:
                    raise _refusal(node, f"%{user.name} also reads it, in its original order")
            if widths.setdefault(node, side.width) != side.width:
                raise _refusal(
                    node, f"heads of width {side.width} and of width {widths[node]} read it"
                )
    return widths


def _interleaved(parameter: Parameter, width: int) -> Parameter:
    """Interleave the two halves of each head, with the same heads on each rank."""
    rows = parameter.type.extent(0)
    view = (rows // width, 2, width // 2)
    whole = Permute(parameter.whole, 0, view, (0, 2, 1))
    kind = parameter.type.in_role(Interleaved(((rows, width),)))
    permuted = Parameter(kind, whole, ()).on_ranks(len(parameter.shards))
    layout = kind.layout_of(0)
    return permuted.sharded(0, layout) if isinstance(layout, Layout) else permuted


def _rotate_pairs(side: _Side) -> None:
    for node in side.nodes:
        node.meta["value"] = None  # no value of the captured graph has this order
        if node.target is ROPE:
            node.args = (*node.args[:3], True)


def _refusal(node: fx.Node, reason: str, hint: str = "") -> PassError:
    named = parameter_of(node).describe() if node.op == "get_attr" else f"%{node.name}"
    return PassError(
        f"{named} cannot be interleaved: {reason}",
        where=str(origin_of(node)),
        got=format_node(node),
        expected="queries and keys that come from separate linears and that only attention reads",
        hint=hint or "Remove interleave-rotary: heads in half-split order give the same results",
    )
