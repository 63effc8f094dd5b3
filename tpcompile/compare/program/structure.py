"""The values of the sharded graph by instruction group, derived from data flow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from tpcompile.compare.groups import Group, Key
from tpcompile.compare.program.texts import Texts
from tpcompile.errors import UnsupportedError
from tpcompile.ir.activations import activations
from tpcompile.ir.layout import Layout
from tpcompile.ir.meta import operand, origin_of, value_type
from tpcompile.ir.ops import ARGMAX, LINEAR, PAGED_ATTENTION, RMS_NORM, ROPE, SWIGLU, arguments_of
from tpcompile.rewriting.structure import head_of, head_ops, output_of

_HEADS = {"q": "head", "k": "kv head", "v": "kv head"}
_NORMS = ("norm", "mlp_norm", "final_norm")
"""The norms of the residual. Each instruction that reads one computes it itself."""


@dataclass(frozen=True)
class Layer:
    """The values of one layer by the name of their group, in the order of the step."""

    number: int
    nodes: dict[str, fx.Node]
    cache: fx.Node
    scale: float
    window: int | None
    width: int
    """The width of a head."""
    interleaved: bool


@dataclass(frozen=True)
class Structure:
    """The groups of a graph that stores K and V and is not yet specialised to one new token."""

    layers: tuple[Layer, ...]
    ends: dict[str, fx.Node]
    """The values outside the layers: `embedding`, `final_norm`, `logits`, `token`."""
    spans: int
    block: int

    def named(self) -> Iterator[tuple[Key, fx.Node]]:
        """Yield every value that a node of the graph computes."""
        for layer in self.layers:
            yield from (((name, layer.number), node) for name, node in layer.nodes.items())
        yield from (((name, None), node) for name, node in self.ends.items())

    def groups(self, texts: Texts) -> tuple[Group, ...]:
        """Return all groups of a step in order, including those that no node computes."""
        batch = len(texts.lengths)
        ends = [_group(name, None, node, batch) for name, node in self.ends.items()]
        layers = (group for layer in self.layers for group in self._layer(layer, texts))
        return (ends[0], *layers, *ends[1:])

    def _layer(self, layer: Layer, texts: Texts) -> Iterator[Group]:
        batch = len(texts.lengths)
        for name, node in layer.nodes.items():
            head = "head" if name == "attention" else _HEADS.get(name.partition("_")[0], "")
            group = _group(name, layer.number, node, batch, head, layer.width if head else 1)
            turned = layer.interleaved and name[0] in "qk"
            if name == "attention":
                yield from self._between(layer, group, texts)
            yield replace(group, interleaved=turned)

    def _between(self, layer: Layer, attention: Group, texts: Texts) -> Iterator[Group]:
        """Yield the groups of the cached keys and values, and of the partial results of spans."""
        kept = texts.seen(layer.window)
        v = _group("v", layer.number, layer.nodes["v"], sum(kept), "kv head", layer.width)
        v = replace(v, lengths=kept)
        yield replace(v, name="k_cached", interleaved=layer.interleaved)
        yield replace(v, name="v_cached")
        heads = attention.columns // attention.width
        for name, wide in (("partial_lse", 1), ("partial_values", layer.width)):
            width = self.spans * wide
            layout = attention.layout and attention.layout.with_grain(width)
            own = {"columns": heads * width, "layout": layout, "width": width}
            yield replace(attention, name=name, spans=self.spans, **own)  # type: ignore[arg-type]


def structure_of(gm: fx.GraphModule, spans: int) -> Structure:
    """Find the groups of a graph, for any model that can be lowered to a program."""
    attention = [node for node in gm.graph.nodes if node.target is PAGED_ATTENTION]
    others = {other.result: other.projections for other in activations(gm.graph)}
    mlps = [node for node in gm.graph.nodes if node.target is SWIGLU or node in others]
    _expect(len(attention) == len(mlps) > 0, attention[-1:], "an MLP in each layer")
    halves = [
        (_attention(a), _mlp(m, *others.get(m, m.args)))
        for a, m in zip(attention, mlps, strict=True)
    ]
    logits = head_of(gm.graph)
    final = _norm_before(logits)
    residuals = [operand(first["norm"]) for first, _ in halves] + [operand(final)]
    layers = []
    for node, (first, second), after in zip(attention, halves, residuals[1:], strict=True):
        nodes = {**first, **second, "mlp_residual": after}
        layers.append(_layer(node, nodes))
    ends = {"embedding": residuals[0], "final_norm": final, "logits": logits, "token": _token(gm)}
    block = int(arguments_of(attention[0])["block"])
    return Structure(tuple(layers), ends, spans, block)


def _layer(attention: fx.Node, nodes: dict[str, fx.Node]) -> Layer:
    bound = arguments_of(attention)
    width = value_type(attention).shape[-1]
    assert isinstance(width, int)
    rope = arguments_of(nodes["q_rotated"])
    return Layer(
        bound["layer"],
        nodes,
        bound["cache"],
        bound["scale"],
        bound["window"],
        width,
        bool(rope.get("interleaved")),
    )


def _attention(node: fx.Node) -> dict[str, fx.Node]:
    """Return the values from the norm to attention, with normed q and k if there are any."""
    bound = arguments_of(node)
    heads = {part: head_ops(bound[part]) for part in _HEADS}
    for part in ("q", "k"):
        _expect(
            heads[part][0].target is ROPE, [bound[part]], "rope as the last op on queries and keys"
        )
    found = {"norm": _norm_before(bound["q"])}
    found |= {part: operand(chain[-1]) for part, chain in heads.items()}
    for part in ("q", "k"):
        normed = [step for step in heads[part] if step.target is RMS_NORM]
        found |= {f"{part}_normed": normed[0]} if normed else {}
    found |= {f"{part}_rotated": heads[part][0] for part in ("q", "k")}
    return {**found, "attention": node}


def _mlp(node: fx.Node, *projections: Any) -> dict[str, fx.Node]:
    """Return the values from the residual to the activation, with gate if it is a linear alone."""
    norm = _norm_before(node)
    found = {"attention_residual": operand(norm), "mlp_norm": norm}
    first, *others = projections
    if others and first.target is LINEAR:
        return {**found, "gate": first, "activated": node}
    return {**found, "swiglu" if node.target is SWIGLU else "activated": node}


def _norm_before(node: fx.Node) -> fx.Node:
    """Return the norm before the linear that computes a value."""
    return _back(_back(node, LINEAR), RMS_NORM)


def _back(node: fx.Node, target: Any) -> fx.Node:
    """Follow first operands back to a node with this target, which may be `node` itself."""
    while node.target is not target:
        _expect(node.op == "call_function", [node], "a norm before every projection")
        node = operand(node)
    return node


def _token(gm: fx.GraphModule) -> fx.Node:
    output = output_of(gm.graph)
    results = output.args[0] if isinstance(output.args[0], Sequence) else ()
    chosen = [node for node in results if isinstance(node, fx.Node) and node.target is ARGMAX]
    _expect(bool(chosen), [output], "the token as a result: add greedy-head to the pipeline")
    return chosen[0]


def _expect(holds: bool, nodes: Sequence[fx.Node], what: str) -> None:
    if not holds:
        places = [f"%{node.name} {origin_of(node)}" for node in nodes]
        raise UnsupportedError(
            "The graph lacks values for the comparison with a program",
            where=", ".join(places),
            expected=what,
        )


def _group(
    name: str, layer: int | None, node: fx.Node, rows: int, head: str = "", width: int = 1
) -> Group:
    """Return the group of a value, with its heads or other units side by side in the columns."""
    kind = value_type(node)
    columns = 1
    for extent in kind.shape[1:]:
        assert isinstance(extent, int)
        columns *= extent
    layout = kind.layout_of(1) if kind.dims > 1 else None
    if layout is not None:
        _expect(isinstance(layout, Layout), [node], "values that are sharded along one axis")
        assert isinstance(layout, Layout)
        layout = layout.with_grain(columns // layout.units)
    return Group(name, layer, rows, columns, layout, head, width, recomputed=name in _NORMS)
