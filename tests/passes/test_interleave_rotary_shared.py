"""A shared parameter is permuted once if all its users allow it, and refused by name otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import fx

from tests.passes.graphs import GraphBuilder, refusal
from tests.passes.test_fuse_norm_linear import numbered
from tpcompile.errors import PassError
from tpcompile.ir.checker import check_graph
from tpcompile.ir.meta import parameter_of, parameters, set_parameter
from tpcompile.ir.ops import ATTENTION, LINEAR, RMS_NORM, ROPE
from tpcompile.ir.ops.rotary import interleave
from tpcompile.ir.recipe import Permute
from tpcompile.passes.interleave_rotary import InterleaveRotary, _interleaved
from tpcompile.rewriting.rewrite import calls, drop_dead

aten = torch.ops.aten
WIDTH, HIDDEN, TOKENS = 8, 16, 5


class Rotary(torch.nn.Module):
    """Rotary module with tables whose halves differ, unlike all models in Hugging Face."""

    def forward(self, positions: torch.Tensor, width: int, dtype: torch.dtype) -> Any:
        return torch.randn(2, len(positions), width, generator=torch.Generator().manual_seed(3))


@dataclass(frozen=True)
class Rotated:
    """Consecutive attentions to rotated heads, and their deviations from the standard structure."""

    layers: int = 1
    weights: dict[str, str] = field(default_factory=dict)
    """Sides that use the weight of another side."""
    norms: dict[str, str] = field(default_factory=lambda: {"q": "q", "k": "k"})
    """The side whose norm each side uses; values have no norm."""
    rotated: str = "qk"
    paired: str = ""
    """The sides that are already interleaved."""
    normed_after: bool = False
    rows_of_keys_are_values: bool = False
    keys_are_values: bool = False
    read: str = ""
    """An additional read: `heads` or `rows` of queries."""
    heads: int = 1
    """The number of KV heads, with two query heads."""

    def graph(self) -> fx.GraphModule:
        builder = _Builder(self)
        x, starts = builder.x, builder.input("starts", "S", dtype=torch.int64)
        for layer in range(self.layers):
            rows = {name: builder.rows(name, layer, x) for name in "qkv"}
            if self.rows_of_keys_are_values:
                rows["v"] = rows["k"]
            q, k, v = (builder.side(name, rows[name]) for name in "qkv")
            values = k if self.keys_are_values else v
            kind = q.meta["type"].in_role(None) if self.paired else None  # this type has no rule
            mixed = builder.call(ATTENTION, q, k, values, starts, 0.25, None, layer, kind=kind)
            also_read = {"heads": [q], "rows": [rows["q"]]}.get(self.read, [])
            for term in (mixed, *(builder.call(aten.neg.default, value) for value in also_read)):
                flat = term.meta["type"].dims == 2
                merged = term if flat else builder.call(aten.flatten.using_ints, term, 1, 2)
                x = builder.call(aten.add.Tensor, x, merged)
        gm = builder.done(x)
        drop_dead(gm.graph)
        return gm


class _Builder(GraphBuilder):
    """Builder of the requested attention sides; parameters are created on first use."""

    def __init__(self, rotated: Rotated) -> None:
        super().__init__()
        self.asked = rotated
        self.x = self.input("x", "T", HIDDEN)
        self.angles = self.tables(WIDTH)
        self.made: dict[str, fx.Node] = {}

    def own(self, name: str, *shape: int) -> fx.Node:
        if name not in self.made:
            self.made[name] = node = self.parameter(name, *shape)
            if name[0] in self.asked.paired:
                set_parameter(node, _interleaved(parameter_of(node), WIDTH))
        return self.made[name]

    def rows(self, name: str, layer: int, x: fx.Node) -> fx.Node:
        source = self.asked.weights.get(name, f"{name}{layer}")
        count = 2 if name == "q" else self.asked.heads
        return self.call(LINEAR, x, self.own(f"{source}.weight", count * WIDTH, HIDDEN))

    def side(self, name: str, rows: fx.Node) -> fx.Node:
        steps = [self.normed, self.turned]
        heads = self.heads(rows, WIDTH)
        for step in steps[::-1] if self.asked.normed_after else steps:
            heads = step(name, heads)
        return heads

    def normed(self, name: str, heads: fx.Node) -> fx.Node:
        source = self.asked.norms.get(name)
        if source is None:
            return heads
        return self.call(RMS_NORM, heads, self.own(f"{source}.norm", WIDTH), 1e-6)

    def turned(self, name: str, heads: fx.Node) -> fx.Node:
        if name not in self.asked.rotated:
            return heads
        return self.call(ROPE, heads, *self.angles, *[True] * (name in self.asked.paired))


def result(gm: fx.GraphModule, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Run the graph with these weights, permuted as the graph's recipes require."""
    gm.rotary = Rotary()
    for node in parameters(gm.graph):
        value = weights[str(node.target)]
        whole = parameter_of(node).whole
        if isinstance(whole, Permute):
            heads = value.reshape(-1, WIDTH, *value.shape[1:]).movedim(1, -1)
            value = interleave(heads).movedim(-1, 1).reshape(value.shape)
        setattr(gm, str(node.target), torch.nn.Parameter(value, requires_grad=False))
    gm.recompile()
    generator = torch.Generator().manual_seed(1)
    inputs = {
        "x": torch.randn(TOKENS, HIDDEN, generator=generator),
        "starts": torch.tensor([0, 2, TOKENS]),
        "positions": torch.arange(TOKENS),
    }
    output: torch.Tensor = gm(*(inputs[n.name] for n in gm.graph.nodes if n.op == "placeholder"))
    return output


FINE: dict[str, tuple[Rotated, int]] = {
    "one layer": (Rotated(), 2),
    "two layers": (Rotated(layers=2), 4),
    "layers that share their weights": (
        Rotated(layers=2, weights={"q": "q0", "k": "k0", "v": "v0"}),
        4,
    ),
    "one norm for queries and keys": (Rotated(norms={"q": "q", "k": "q"}), 2),
    "one weight for queries and keys": (Rotated(weights={"k": "q0"}, heads=2), 2),
    "norms after the rotation": (Rotated(normed_after=True), 2),
}


@pytest.mark.parametrize("name", FINE)
def test_what_is_shared_is_permuted_once(name: str) -> None:
    """Tables with different halves agree, so each element of a pair uses its own column."""
    rotated, matches = FINE[name]
    gm = numbered(rotated.graph())
    weights = {name: value.detach() for name, value in gm.named_parameters()}
    before = result(gm, weights)
    assert InterleaveRotary().apply(gm).matches == matches
    assert check_graph(gm) == []
    permuted = [parameter_of(node).whole for node in parameters(gm.graph)]
    assert all(
        not isinstance(recipe.source, Permute) for recipe in permuted if isinstance(recipe, Permute)
    )
    torch.testing.assert_close(result(gm, weights), before, rtol=1e-5, atol=1e-5)


REFUSED: dict[str, tuple[Rotated, str]] = {
    "values with the weight of keys": (
        Rotated(weights={"v": "k0"}),
        "k0.weight cannot be interleaved: %linear_2 also reads it",
    ),
    "values with the norm of keys": (
        Rotated(norms={"q": "q", "k": "k", "v": "k"}),
        "k.norm cannot be interleaved: %rms_norm_2 also reads it",
    ),
    "values of the rows of keys": (
        Rotated(rows_of_keys_are_values=True),
        "%linear_1 cannot be interleaved: %unflatten_2 also reads it",
    ),
    "keys as values": (Rotated(keys_are_values=True), "and not as queries or keys"),
    "queries read elsewhere": (Rotated(read="heads"), "%neg also reads it"),
    "rows of queries read elsewhere": (Rotated(read="rows"), "%neg also reads it"),
    "two layouts": (Rotated(paired="q"), "queries and keys are rotated in different layouts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_others_read_is_refused_by_name(name: str) -> None:
    rotated, reason = REFUSED[name]
    gm = rotated.graph()
    before = {node: parameter_of(node) for node in parameters(gm.graph)}
    with pytest.raises(PassError) as refused:
        InterleaveRotary().apply(gm)
    assert reason in str(refused.value)
    assert {node: parameter_of(node) for node in parameters(gm.graph)} == before
    assert all(len(node.args) == 3 or name == "two layouts" for node in calls(gm, ROPE))


def test_a_layer_that_rotates_nothing_is_left() -> None:
    message = refusal(InterleaveRotary(), Rotated(rotated="").graph())
    assert "There is no attention to rotated heads in the graph" in message
    assert "%rms_norm is not rotated" in message


@pytest.mark.parametrize("side", "qk")
def test_one_side_alone_is_not_permuted(side: str) -> None:
    """Permuting one side is refused, since scores would compare two orders."""
    message = refusal(InterleaveRotary(), Rotated(rotated=side).graph())
    assert "is not rotated" in message
