"""The values of a layer of the sharded graph by instruction group, derived from data flow."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tpcompile.compare.groups import Group
from tpcompile.compare.program.texts import Texts
from tpcompile.errors import UnsupportedError
from tpcompile.ir.layout import FusedLayout, Layout
from tpcompile.ir.meta import operand, origin_of, value_type
from tpcompile.ir.ops import (
    GATED_RMS_NORM,
    LINEAR,
    PAGED_ATTENTION,
    RESUMED_CONV,
    RESUMED_DELTA_RULE,
    RMS_NORM,
    ROPE,
    SIGMOID_GATE,
    arguments_of,
)
from tpcompile.rewriting.structure import head_ops

_NORMS = ("norm", "mlp_norm", "final_norm")
"""The norms of the residual. Each instruction that reads one computes it itself."""
_UNITS = {
    **dict.fromkeys(("q", "q_normed", "q_rotated"), "head"),
    **dict.fromkeys(("attention_gate", "ungated", "attention"), "head"),
    **dict.fromkeys(("k", "k_normed", "k_rotated", "v"), "kv head"),
    **dict.fromkeys(("q_conv", "k_conv"), "key head"),
    **dict.fromkeys(("v_conv", "decay", "beta", "delta_rule", "mixed"), "value head"),
}
"""The units of columns that are heads."""


@dataclass(frozen=True)
class Layer(ABC):
    """The values of one layer by the name of their group, in the order of the step."""

    number: int
    place: int
    """The index of the layer in the cache or in the states."""
    nodes: dict[str, fx.Node]

    def groups(self, texts: Texts, spans: int) -> Iterator[Group]:
        """Yield all groups in order, including those that no node computes."""
        for name, node in self.nodes.items():
            yield self._group(name, node, len(texts.lengths))
            yield from self.after(name, texts, spans)

    @abstractmethod
    def after(self, name: str, texts: Texts, spans: int) -> Iterator[Group]:
        """Yield the groups that no node computes and that come after this one."""

    @property
    @abstractmethod
    def heads(self) -> dict[str, int]:
        """The number of heads of each unit."""

    def _group(self, name: str, node: fx.Node, rows: int) -> Group:
        unit = _UNITS.get(name, "")
        return group_of(name, self.number, node, rows, unit, self.heads[unit] if unit else 0)


@dataclass(frozen=True)
class AttentionLayer(Layer):
    """A layer with attention to the keys and values in a cache."""

    scale: float
    window: int | None
    interleaved: bool

    @property
    def width(self) -> int:
        """The width of a head."""
        return _extent(self.nodes[self.result], -1)

    @property
    def result(self) -> str:
        """The name of the value that the attention function returns."""
        return "ungated" if "ungated" in self.nodes else "attention"

    @property
    def heads(self) -> dict[str, int]:
        """The number of query heads and of KV heads."""
        return {
            "head": _extent(self.nodes["q_rotated"], 1),
            "kv head": _extent(self.nodes["k_rotated"], 1),
        }

    def after(self, name: str, texts: Texts, spans: int) -> Iterator[Group]:
        """Yield the cached keys and values, and the partial results of spans."""
        if name != "k_rotated":
            return
        counts = texts.visible_counts(self.window)
        v = replace(self._group("v", self.nodes["v"], sum(counts)), lengths=counts)
        yield replace(v, name="k_cached", interleaved=self.interleaved)
        yield replace(v, name="v_cached")
        attention = self._group("attention", self.nodes["attention"], len(texts.lengths))
        for part, wide in (("partial_lse", 1), ("partial_values", self.width)):
            yield replace(_wide_heads(attention, spans * wide), name=part, spans=spans)

    def _group(self, name: str, node: fx.Node, rows: int) -> Group:
        turned = self.interleaved and name[0] in "qk"
        return replace(super()._group(name, node, rows), interleaved=turned)


@dataclass(frozen=True)
class DeltaLayer(Layer):
    """A layer of linear attention, with the inputs of its convolution and a matrix per head."""

    conv: fx.Node

    @property
    def tail_length(self) -> int:
        """The number of inputs of the convolution that a sequence keeps."""
        return _extent(arguments_of(self.conv)["weight"], -1) - 1

    @property
    def channels(self) -> dict[str, int]:
        """The number of channels of each part of the convolution's result, in order."""
        parts = {name: self.nodes[name] for name in ("q_conv", "k_conv", "v_conv")}
        return {name: _extent(node, 1) * _extent(node, 2) for name, node in parts.items()}

    @property
    def heads(self) -> dict[str, int]:
        """The number of key heads and of value heads."""
        rule = arguments_of(self.nodes["delta_rule"])
        return {"key head": _extent(rule["k"], 1), "value head": _extent(rule["v"], 1)}

    def after(self, name: str, texts: Texts, spans: int) -> Iterator[Group]:
        """Yield the states after the new token: the last inputs, and the matrices of heads."""
        batch = len(texts.lengths)
        if name == "gates":
            tail = self._group("tail", self.conv, batch * self.tail_length)
            yield replace(tail, lengths=(self.tail_length,) * batch)
        if name == "beta":
            states = value_type(arguments_of(self.nodes["delta_rule"])["states"])
            heads = self._group("decay", self.nodes["decay"], batch)
            wide = _wide_heads(heads, states.extent(-2) * states.extent(-1))
            yield replace(wide, name="state")


def attention_layer(number: int, node: fx.Node) -> AttentionLayer:
    """Return a layer with the values from the norm to attention."""
    bound = arguments_of(node)
    heads = {part: head_ops(bound[part]) for part in ("q", "k", "v")}
    for part in ("q", "k"):
        last = "rope as the last op on queries and keys"
        expect(heads[part][0].target is ROPE, [bound[part]], last)
    gated = [user for whole in node.users for user in whole.users if user.target is SIGMOID_GATE]
    nodes = {"norm": norm_before(bound["q"])}
    nodes |= {part: operand(chain[-1]) for part, chain in heads.items()}
    nodes |= {"attention_gate": operand(gated[0], 1)} if gated else {}
    for part in ("q", "k"):
        normed = [step for step in heads[part] if step.target is RMS_NORM]
        nodes |= {f"{part}_normed": normed[0]} if normed else {}
    nodes |= {f"{part}_rotated": heads[part][0] for part in ("q", "k")}
    nodes |= {"ungated": node, "attention": gated[0]} if gated else {"attention": node}
    interleaved = bool(arguments_of(nodes["q_rotated"]).get("interleaved"))
    return AttentionLayer(
        number, bound["layer"], nodes, bound["scale"], bound["window"], interleaved
    )


def delta_layer(number: int, node: fx.Node) -> DeltaLayer:
    """Return a layer with the values from the norm to the gated results of linear attention."""
    bound = arguments_of(node)
    conv = _back(bound["q"], RESUMED_CONV, "a convolution before the delta rule")
    gated = _reader(node, GATED_RMS_NORM)
    projected, z = (
        _back(value, LINEAR, "a projection of the inputs of linear attention")
        for value in (operand(conv), arguments_of(gated)["gate"])
    )
    nodes = {"norm": norm_before(projected), "projected": projected}
    nodes |= {"z": z} if z is not projected else {}
    nodes |= {"gates": _fused(operand(bound["decay"]))}
    nodes |= {f"{part}_conv": bound[part] for part in ("q", "k", "v")}
    nodes |= {name: bound[name] for name in ("decay", "beta")}
    mixed = _reader(gated, torch.ops.aten.flatten.using_ints)
    nodes |= {"delta_rule": node, "mixed": mixed}
    return DeltaLayer(number, bound["layer"], nodes, conv)


MIXERS = {PAGED_ATTENTION: attention_layer, RESUMED_DELTA_RULE: delta_layer}
"""The function that finds the first half of a layer, by the op that mixes its tokens."""


def _fused(part: fx.Node) -> fx.Node:
    """Return the linear of which a value is one part."""
    linear = _back(part, LINEAR, "a projection of the inputs of linear attention")
    fused = "two linears for the inputs of linear attention: add fuse-delta to the pipeline"
    expect(linear is not part, [part], fused)
    return linear


def _reader(node: fx.Node, target: Any) -> fx.Node:
    """Return the only reader of a value, which has this target."""
    (*earlier, last) = node.users
    expect(not earlier and last.target is target, [node], f"only {target} as its reader")
    return last


def norm_before(node: fx.Node) -> fx.Node:
    """Return the norm before the linear that computes a value."""
    expected = "a norm before every projection"
    return _back(_back(node, LINEAR, expected), RMS_NORM, expected)


def _back(node: fx.Node, target: Any, expected: str) -> fx.Node:
    """Follow first operands back to a node with this target, which may be `node` itself."""
    while node.target is not target:
        expect(node.op == "call_function", [node], expected)
        node = operand(node)
    return node


def expect(holds: bool, nodes: Sequence[fx.Node], expected: str) -> None:
    """Refuse a graph unless a condition holds; name these nodes."""
    if not holds:
        places = [f"%{node.name} {origin_of(node)}" for node in nodes]
        raise UnsupportedError(
            "The graph lacks values for the comparison with a program",
            where=", ".join(places),
            expected=expected,
        )


def group_of(
    name: str, layer: int | None, node: fx.Node, rows: int, unit: str = "", heads: int = 0
) -> Group:
    """Return the group of a value, with its heads or other units side by side in the columns."""
    kind = value_type(node)
    columns = math.prod(kind.extent(dim) for dim in range(1, kind.dims))
    layout = kind.layout_of(1) if kind.dims > 1 else None
    if isinstance(layout, Layout):
        layout = layout.with_grain(columns // layout.units)
    known = layout is None or isinstance(layout, Layout | FusedLayout)
    expect(known, [node], "values that are sharded by features")
    assert layout is None or isinstance(layout, Layout | FusedLayout)
    width = columns // heads if unit else 1
    return Group(name, layer, rows, columns, layout, unit, width, recomputed=name in _NORMS)


def _wide_heads(group: Group, width: int) -> Group:
    """Return the group with another number of columns per head."""
    assert not isinstance(group.layout, FusedLayout)
    layout = group.layout and group.layout.with_grain(width)
    columns = group.columns // group.width * width
    return replace(group, columns=columns, layout=layout, width=width)


def _extent(node: fx.Node, dim: int) -> int:
    return value_type(node).extent(dim)
