"""In the source of a layer, a name never refers to two live values at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from tpcompile.backends.torch_tp import functions
from tpcompile.backends.torch_tp.layers import layer_codes, sections_of
from tpcompile.backends.torch_tp.storage import Storage
from tpcompile.ir.meta import Origin, Parameter, new_parameter
from tpcompile.ir.recipe import Tensor
from tpcompile.ir.types import ValueType

aten = torch.ops.aten
WIDTH = 4


class _Drawn:
    """Graph of one layer, number 7, which reads values from outside the layer."""

    def __init__(self) -> None:
        self.graph, self.root = fx.Graph(), nn.Module()
        self.x = self.graph.placeholder("x")
        self.x.meta["type"] = ValueType(("T", WIDTH), torch.float32)

    def call(self, name: str, target: Any, *args: Any, layer: int | None = 7) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, name=name)
        node.meta = {"type": self.x.meta["type"], "origin": Origin("", layer=layer)}
        return node

    def weight(self, name: str) -> fx.Node:
        parameter = Parameter.replicated(Tensor(name, (WIDTH,)), torch.float32, 1)
        return new_parameter(self.graph, name, parameter, Origin("", layer=7), self.root)

    def layer(self, result: fx.Node, **parameters: torch.Tensor) -> nn.Module:
        """Return the compiled module of the layer."""
        self.graph.output(result)
        (section,) = (s for s in sections_of(self.graph, ()) if s.layer == 7)
        (code,) = layer_codes(section, 1, dict.fromkeys(parameters, Storage.ROWS), {})
        space: dict[str, Any] = {"torch": torch, "F": functional, "tpc": functions}
        exec(code.source("Layer", [7]), space)
        module: nn.Module = space["Layer"](7, parameters, None)
        return module


def test_a_value_from_elsewhere_that_is_read_after_its_name_is_used_again() -> None:
    """A name from outside is not rebound while the layer still reads it, as in Granite."""
    drawn = _Drawn()
    outer = drawn.call("mul", aten.mul.Tensor, drawn.x, 12.0, layer=None)
    relu = drawn.call("l7_relu", aten.relu.default, outer)
    scaled = drawn.call("l7_mul", aten.mul.Tensor, relu, 0.5)
    total = drawn.call("l7_residual", aten.add.Tensor, outer, scaled)
    x = torch.randn(3, WIDTH)
    assert torch.equal(drawn.layer(total)(x), x + x.relu() * 0.5)


def test_a_name_is_used_again_once_nothing_reads_the_value() -> None:
    drawn = _Drawn()
    outer = drawn.call("residual", aten.mul.Tensor, drawn.x, 12.0, layer=None)
    total = drawn.call("l7_residual", aten.relu.default, outer)
    last = drawn.call("l7_residual_1", aten.add.Tensor, total, total)
    module = drawn.layer(last)
    x = torch.randn(3, WIDTH)
    assert torch.equal(module(x), x.relu() * 2)


def test_parameters_of_one_short_name() -> None:
    """A layer's parameter, an outer one, and names taken by the module itself stay distinct."""
    drawn = _Drawn()
    names = ("scale", "l7_scale", "l7_group", "l7_forward")
    value = drawn.call("l7_mul", aten.mul.Tensor, drawn.x, drawn.weight(names[0]))
    for number, name in enumerate(names[1:], 1):
        value = drawn.call(f"l7_mul_{number}", aten.mul.Tensor, value, drawn.weight(name))
    weights = {name: torch.randn(WIDTH) for name in names}
    x = expected = torch.randn(3, WIDTH)
    for weight in weights.values():
        expected = expected * weight
    module = drawn.layer(value, **weights)
    assert torch.equal(module(x), expected)
    assert len(list(module.parameters())) == len(names)


def test_values_of_one_short_name() -> None:
    drawn = _Drawn()
    relu = drawn.call("q", aten.relu.default, drawn.x)
    other = drawn.call("l7_q", aten.mul.Tensor, drawn.x, 3.0)
    total = drawn.call("l7_add", aten.add.Tensor, relu, other)
    x = torch.randn(3, WIDTH)
    assert torch.equal(drawn.layer(total)(x), x.relu() + x * 3.0)


def test_code_that_is_the_same_on_all_ranks_is_written_once() -> None:
    """Emission takes no longer for more ranks, apart from what differs between them."""
    drawn = _Drawn()
    result = drawn.call("l7_relu", aten.relu.default, drawn.x)
    drawn.graph.output(result)
    (section,) = sections_of(drawn.graph, ())
    first, *other_codes = layer_codes(section, 3, {}, {})
    assert len(other_codes) == 2
    assert all(code.body[0] is first.body[0] for code in other_codes)
