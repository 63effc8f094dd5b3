"""Records of layer calls, which decide whether one layer may be stamped from another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from tpcompile.errors import UnsupportedError
from tpcompile.frontend.layers import Layers
from tpcompile.frontend.masks import Mask, Meaning, masks_in, meaning_of
from tpcompile.frontend.shell import (
    StandIn,
    TokenParallel,
    as_capture_errors,
    example_inputs,
    make_shell,
)


def watch_layers(module: nn.Module, layers: Layers) -> Layers:
    """Record how the model calls its layers, and separate layers with different arguments.

    Each layer must take the output of the previous layer unchanged; otherwise a stamped layer would
    be wrong. Stand-ins that compute nothing replace the layers, so this is fast.
    """
    calls: list[_Call] = []
    shell = make_shell(
        module, layers, (), lambda number, layer: StandIn(layer, partial(_watched, calls, number))
    )
    plain = _calls_of(shell, calls, torch.arange(len(_PACKED), device="cpu"))
    _refuse_other_calls(type(module).__name__, layers, [call.layer for call in plain])
    if not all(after.hidden is before.result for before, after in pairwise(plain)):
        raise UnsupportedError(
            f"{type(module).__name__} computes something between its layers",
            where=layers.path,
            expected="layers that each take the output of the previous layer",
        )
    packed = _calls_of(shell, calls, torch.tensor(_PACKED, device="cpu"))
    where = f"{type(module).__name__}.{layers.path}"
    return replace(
        layers.told_apart([call.argument_keys for call in plain]),
        masks=_meanings(zip(plain, packed, strict=True), where),
        mask_arguments=tuple(_mask_given(call, where)[0] for call in plain),
    )


_PACKED = (0, 1, 2, 3, 0, 1, 2)
"""Positions of two sequences packed into one row."""


def _calls_of(shell: nn.Module, calls: list[_Call], positions: torch.Tensor) -> list[_Call]:
    """Return the calls of all layers for tokens at these positions.

    Positions are real tensors, not on meta: Hugging Face searches them for packed sequences.
    """
    calls.clear()
    ids, _, starts, rows = example_inputs()
    with as_capture_errors(shell), torch.no_grad():
        TokenParallel(shell)(ids, positions, starts, rows)
    return list(calls)


def _meanings(pairs: Iterable[tuple[_Call, _Call]], path: str) -> tuple[Meaning | None, ...]:
    """Return the meaning of each layer's mask. A mask that layers share is evaluated once."""
    known: dict[Any, Meaning] = {}
    meanings = []
    for index, calls in enumerate(pairs):
        where = f"{path}.{index}"
        plain, packed = mask_pair = tuple(_mask_given(call, where)[1] for call in calls)
        if plain is not None and packed is not None and mask_pair not in known:
            known[mask_pair] = meaning_of(plain, packed, torch.tensor(_PACKED, device="cpu"), where)
        meanings.append(known.get(mask_pair))
    return tuple(meanings)


def _mask_given(call: _Call, where: str) -> tuple[int | str | None, Mask | None]:
    """Return the argument that holds the attention mask and the mask itself, or (None, None)."""
    named_masks = [
        (name, mask) for name, value in call.arguments.items() for mask in masks_in(value)
    ]
    if not named_masks:
        return None, None
    name, mask = named_masks[0]
    if len(named_masks) > 1 or call.arguments[name] is not mask:
        raise UnsupportedError(
            "A layer is given several attention masks, or one inside a collection",
            where=where,
            got=", ".join(str(name) for name, _ in named_masks),
            expected="one argument that is the attention mask",
        )
    return name, mask


@dataclass(frozen=True)
class _Call:
    """A layer's call. It holds its arguments, so that their ids in `argument_keys` stay unique."""

    layer: int
    hidden: Any
    result: torch.Tensor
    argument_keys: tuple[Any, ...]
    arguments: Any


def _watched(
    calls: list[_Call], number: int, hidden: Any, arguments: dict[Any, Any]
) -> torch.Tensor:
    """Record a call of a layer, and return a new tensor."""
    result = torch.empty_like(hidden)
    keys = tuple((name, _mark(value)) for name, value in arguments.items())
    calls.append(_Call(number, hidden, result, keys, arguments))
    return result


def _refuse_other_calls(name: str, layers: Layers, called: list[int]) -> None:
    """Refuse a model that does not call each layer once, in order."""
    numbers = range(len(layers.kinds))
    if called == list(numbers):
        return
    left_out = sorted(set(numbers) - set(called))
    if left_out:
        raise UnsupportedError(
            f"{name} does not call layer {left_out[0]}",
            where=layers.path,
            got=f"calls to {len(set(called))} of its {len(numbers)} layers",
            expected="a forward pass that calls every layer",
            hint="Build the model with as many layers as it calls",
        )
    raise UnsupportedError(
        f"{name} does not call each of its layers once, in order",
        where=layers.path,
        got=f"{len(called)} calls to {len(numbers)} layers",
        expected="layers that each take the output of the previous layer",
    )


def _mark(value: Any) -> Any:
    """Return a key that is equal for identical objects and for equal plain values.

    All masks have the same key, because `Layers.masks` stores their meanings.
    """
    if isinstance(value, tuple | list):
        return tuple(map(_mark, value))
    if isinstance(value, Mask):
        return Mask
    plain = value is None or isinstance(value, int | float | str)
    return value if plain else id(value)
