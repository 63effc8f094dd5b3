"""How a model calls its layers: what makes it right to stamp one from another."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from tpcompile.errors import UnsupportedError
from tpcompile.frontend.layers import Layers
from tpcompile.frontend.shell import (
    TokenParallel,
    as_capture_errors,
    example_inputs,
    make_shell,
)


def watch_layers(module: nn.Module, layers: Layers) -> Layers:
    """See how the model calls its layers, and tell those apart that are given other things.

    Each layer must take the value that the one before it gave, as it is: only then is a stamped
    layer right. The layers themselves do nothing here, so this takes no time.
    """
    calls: list[_Call] = []
    every = tuple(range(len(layers.kinds)))
    shell = make_shell(module, layers, every, lambda layer: _Watched(layer, calls))
    with as_capture_errors(shell), torch.no_grad():
        TokenParallel(shell)(*example_inputs())
    straight = len(calls) == len(every) and all(
        after.hidden is before.result for before, after in pairwise(calls)
    )
    if not straight:
        raise UnsupportedError(
            f"{type(module).__name__} computes something between its layers",
            where=layers.path,
            expected="layers that each take what the one before gave",
        )
    return layers.told_apart([call.others for call in calls])


@dataclass(frozen=True)
class _Call:
    """What a layer was given, and what it gave; values are told apart by identity."""

    hidden: Any
    result: torch.Tensor
    others: tuple[Any, ...]
    kept: Any


class _Watched(nn.Module):
    """Stands in for a layer: notes its arguments."""

    def __init__(self, layer: nn.Module, calls: list[_Call]) -> None:
        super().__init__()
        self._calls = calls
        plain = {k: v for k, v in vars(layer).items() if isinstance(v, int | float | str)}
        vars(self).update({k: v for k, v in plain.items() if k not in vars(self)})

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = dict(enumerate(args)) | kwargs
        hidden = given.pop(0, None)
        if hidden is None:
            hidden = given.pop("hidden_states", None)
        result = torch.empty_like(hidden)
        others = tuple((name, _mark(value)) for name, value in given.items())
        self._calls.append(_Call(hidden, result, others, kept=given))
        return result


def _mark(value: Any) -> Any:
    """Equal for the same value, and for equal settings."""
    if isinstance(value, tuple | list):
        return tuple(map(_mark, value))
    plain = value is None or isinstance(value, int | float | str)
    return value if plain else id(value)
