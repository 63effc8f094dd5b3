"""A test of whether product rows are independent. If so, chunks of prompts share a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch

from tpcompile.backends.executor import EXECUTORS, TORCH
from tpcompile.backends.torch_tp import as_matrix
from tpcompile.ir.format import Format
from tpcompile.ir.meta import operand, value_type
from tpcompile.ir.ops import EXPERTS, LINEAR
from tpcompile.runtime.backend import MODULES
from tpcompile.runtime.model import CompiledModel

ROWS = 16
"""The rows whose logits are computed together; fewer are padded, more are padded to a multiple."""
_LEAST = (ROWS, 65, 128)
"""The candidates for the minimum number of rows. Some kernels differ for up to 64."""
_MORE = (0, 1, 48, 113, 256)
"""The numbers of additional rows that are tried."""
_MOST_OUT = 16384
"""The largest number of columns of a product that are tried; vocabularies have more."""


def independent_from(model: CompiledModel) -> int | None:
    """Return the number of rows from which on this model's products give each row the same bits.

    Kernels may choose the order of a sum by the number of rows, so this is measured, with the
    library and the number of threads of this process. None means that rows depend on each other.
    The rows of an expert are those of the tokens that have chosen it, so any number of them must be
    independent.
    """
    package = TORCH if model.backend == MODULES else EXECUTORS[model.backend].functions
    functions = import_module(f"{package}.functions")

    def independent(places: Mapping[Any, Sequence[int]], least: int) -> bool:
        weights = (_weight(functions, model, *kind) for kind in _kinds(model, places))
        return all(_independent(functions.linear, *weight, model, least) for weight in weights)

    if not independent(_OF_EXPERTS, 1):
        return None
    return next((least for least in _LEAST if independent(_OF_LINEARS, least)), None)


_OF_LINEARS = {LINEAR: (1,)}
_OF_EXPERTS = {EXPERTS: (3, 4)}
"""The places of weights among the operands of ops."""


def _kinds(
    model: CompiledModel, places: Mapping[Any, Sequence[int]]
) -> list[tuple[int, int, Format | None]]:
    """Return the shapes and formats of such weights, on all ranks."""
    weights = {
        operand(node, place)
        for node in model.graph.graph.nodes
        for place in places.get(node.target, ())
    }
    types = [value_type(weight) for weight in weights]
    shapes = [
        (weight_type.local_shape(rank), weight_type.format)
        for weight_type in types
        for rank in range(model.tp)
    ]
    kinds = {(int(out), int(width), stored) for (*_, out, width), stored in shapes}
    return sorted(kinds, key=str)


def _weight(
    functions: Any, model: CompiledModel, out: int, width: int, stored: Format | None
) -> tuple[Any, int]:
    """Return a random weight as the modules give it to their linears, and its columns."""
    out = min(out, _MOST_OUT)
    if stored is None:
        weight = _random(out, width, model.dtype, model.device)
        return (as_matrix(weight) if model.backend == MODULES else weight), width
    parts = [
        _random(out, part.width(0, width), part.dtype.torch, model.device)
        for part in stored.components
    ]
    return functions.decoded(str(stored), parts, (0, width), model.dtype), width


@torch.inference_mode()
def _independent(
    linear: Callable[[torch.Tensor, Any], torch.Tensor],
    weight: Any,
    width: int,
    model: CompiledModel,
    least: int,
) -> bool:
    """Return whether runs of at least `least` rows give the bits of one run of all rows."""
    every = _random(least + max(_MORE), width, model.dtype, model.device)
    whole = linear(every, weight)
    runs = [every[-least - more :].clone() for more in _MORE]
    return all(torch.equal(linear(run, weight), whole[-len(run) :]) for run in runs)


def _random(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return random numbers, or integers of any bits."""
    dice = torch.Generator().manual_seed(rows * columns)
    if not dtype.is_floating_point:
        numbers = torch.iinfo(dtype)
        size = (rows, columns)
        integers = torch.randint(numbers.min, numbers.max, size, generator=dice, dtype=dtype)
        return integers.to(device)
    return torch.randn(rows, columns, generator=dice).to(device, dtype)
