"""Tests of layers that look alike: the first and the last must make the same calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.models import scaled_config
from tpcompile.frontend.layers import find_layers
from tpcompile.frontend.record import unlike_layers
from tpcompile.frontend.watch import watch_layers

Change = Callable[[int, Any, Any], Any]


def _unlike(change: Change, name: str = "qwen3-0.6b", part: str = "mlp") -> tuple[int, int] | None:
    """Return the unlike layers of a model in which a function changes the results of a part."""
    with torch.device("meta"):
        config = scaled_config(name, num_hidden_layers=4)
        model: Any = AutoModelForCausalLM.from_config(config).eval()
    parts = [layer.get_submodule(part) for layer in model.model.layers]
    kind = type(parts[0])

    def forward(self: Any, x: torch.Tensor, *args: Any, **options: Any) -> Any:
        return change(self.layer_idx, x, kind.forward(self, x, *args, **options))

    changed = type("Changed", (kind,), {"forward": forward})
    for number, module in enumerate(parts):
        module.__class__ = changed
        module.layer_idx = number
    return unlike_layers(model, watch_layers(model, find_layers(model)))


_TABLES = tuple(torch.zeros(1, device="meta") for _ in range(2))
_MADE: dict[int, torch.Tensor] = {}


def _of_the_first(number: int, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    _MADE[number] = result
    return result + _MADE[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda number, _, result: result * 2.0 if number == 3 else result,
        lambda number, _, result: result * (2.0 if number == 3 else 3.0),
        lambda number, _, result: result.mul(2.0) if number == 3 else result.add(2.0),
        lambda number, x, result: result + (x if number == 3 else result),
        lambda number, _, result: result[:, : 8 if number == 3 else None],
        lambda number, x, result: (x.exp(), result)[1] if number == 3 else (x.exp(), x)[1],
        lambda number, _, result: result + _TABLES[number == 3],
        _of_the_first,
    ],
    ids=["call", "number", "function", "operand", "slice", "result", "table", "of another layer"],
)
def test_the_last_layer_computes_differently(change: Change) -> None:
    assert _unlike(change) == (0, 3)


def test_the_last_layer_returns_another_value() -> None:
    assert _unlike(lambda number, x, result: x if number == 3 else result, part="") == (0, 3)


def test_layers_that_differ_in_weights_and_numbers_only() -> None:
    assert _unlike(lambda _, x, result: result[:, :8].chunk(2)[0] + x.mean()) is None


@pytest.mark.parametrize(("layer", "pair"), [(2, (0, 2)), (3, (1, 3))])
def test_every_kind_is_compared(layer: int, pair: tuple[int, int]) -> None:
    """Layers 0 and 2 are of one kind, and 1 and 3 of the other."""
    assert _unlike(lambda number, _, x: x * 2.0 if number >= layer else x, "qwen3.5-0.8b") == pair


def test_one_layer_of_each_kind_is_not_run() -> None:
    layers = find_layers(nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])))
    assert unlike_layers(nn.Identity(), layers) is None
