"""The values of the sharded graph by instruction group, derived from data flow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from tpcompile.compare.groups import Group, Key
from tpcompile.compare.program.layers import (
    MIXERS,
    AttentionLayer,
    DeltaLayer,
    Layer,
    expect,
    group_of,
    norm_before,
)
from tpcompile.compare.program.texts import Texts
from tpcompile.ir.activations import activations
from tpcompile.ir.meta import operand, origin_of
from tpcompile.ir.ops import ARGMAX, LINEAR, SWIGLU, arguments_of
from tpcompile.passes.cache_kv import block_size
from tpcompile.rewriting.structure import ExpertBlock, expert_blocks, head_of, output_of


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

    @property
    def routers(self) -> dict[int, str]:
        """The modules of the routers in the Hugging Face model, by layer."""
        return {
            layer.number: origin_of(layer.nodes["router"]).module
            for layer in self.layers
            if "router" in layer.nodes
        }

    @property
    def normalized(self) -> dict[int, bool]:
        """Whether the scores of a layer's experts add up to 1, by layer."""
        return {
            layer.number: arguments_of(operand(layer.nodes["choice"]))["normalized"]
            for layer in self.layers
            if "choice" in layer.nodes
        }

    @property
    def attention(self) -> tuple[AttentionLayer, ...]:
        """The layers with a cache, in the order of the cache."""
        return tuple(layer for layer in self.layers if isinstance(layer, AttentionLayer))

    @property
    def deltas(self) -> tuple[DeltaLayer, ...]:
        """The layers of linear attention, in the order of their states."""
        return tuple(layer for layer in self.layers if isinstance(layer, DeltaLayer))

    def groups(self, texts: Texts) -> tuple[Group, ...]:
        """Return all groups of a step in order, including those that no node computes."""
        batch = len(texts.lengths)
        ends = [group_of(name, None, node, batch) for name, node in self.ends.items()]
        layers = (group for layer in self.layers for group in layer.groups(texts, self.spans))
        return (ends[0], *layers, *ends[1:])


def structure_of(gm: fx.GraphModule, spans: int) -> Structure:
    """Find the groups of a graph, for any model that can be lowered to a program."""
    mixers = [node for node in gm.graph.nodes if node.target in MIXERS]
    projections = {
        activation.result: activation.projections for activation in activations(gm.graph)
    }
    mixtures = expert_blocks(gm.graph)
    shared = {operand(mixture.shared) for mixture in mixtures if mixture.shared}
    seconds = {mixture.experts: _mixture(mixture) for mixture in mixtures}
    seconds |= {
        node: _mlp(node, *projections.get(node, node.args))
        for node in gm.graph.nodes
        if (node.target is SWIGLU and node not in shared) or node in projections
    }
    mlps = [node for node in gm.graph.nodes if node in seconds]
    expect(len(mixers) == len(mlps) > 0, mixers[-1:], "an MLP in each layer")
    halves = [
        (MIXERS[mixer.target](number, mixer), seconds[mlp])
        for number, (mixer, mlp) in enumerate(zip(mixers, mlps, strict=True))
    ]
    logits = head_of(gm.graph)
    final = norm_before(logits)
    residuals = [operand(first.nodes["norm"]) for first, _ in halves] + [operand(final)]
    layers: list[Layer] = []
    for (first, second), after in zip(halves, residuals[1:], strict=True):
        layers.append(replace(first, nodes={**first.nodes, **second, "mlp_residual": after}))
    ends = {"embedding": residuals[0], "final_norm": final, "logits": logits, "token": _token(gm)}
    return Structure(tuple(layers), ends, spans, block_size(gm))


def _mlp(node: fx.Node, *projections: Any) -> dict[str, fx.Node]:
    """Return the values from the residual to the activation, with gate if it is a linear alone."""
    norm = norm_before(node)
    nodes = {"attention_residual": operand(norm), "mlp_norm": norm}
    first, *following = projections
    if following and first.target is LINEAR:
        return {**nodes, "gate": first, "activated": node}
    return {**nodes, "swiglu" if node.target is SWIGLU else "activated": node}


def _mixture(block: ExpertBlock) -> dict[str, fx.Node]:
    """Return the values of a mixture of experts that are stored for all choices alike."""
    norm = norm_before(block.router)
    nodes = {"attention_residual": operand(norm), "mlp_norm": norm, "router": block.router}
    operands = arguments_of(block.experts)
    nodes |= {"choice": operands["ids"], "scores": operands["scores"]}
    if block.shared is not None and block.shared_gate is not None:
        nodes |= {"swiglu": operand(block.shared), "shared_gate": block.shared_gate}
    return nodes


def _token(gm: fx.GraphModule) -> fx.Node:
    output = output_of(gm.graph)
    results = output.args[0] if isinstance(output.args[0], Sequence) else ()
    chosen = [node for node in results if isinstance(node, fx.Node) and node.target is ARGMAX]
    expect(bool(chosen), [output], "the token as a result: add greedy-head to the pipeline")
    return chosen[0]
