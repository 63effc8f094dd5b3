"""Whether the rows of a product depend on other rows. If not, chunks of prompts can share a run."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from tpcompile.backends.executor import EXECUTORS, TORCH
from tpcompile.backends.torch_tp import as_matrix
from tpcompile.ir.meta import value_type
from tpcompile.ir.ops import LINEAR
from tpcompile.runtime.backend import MODULES
from tpcompile.runtime.model import CompiledModel

ROWS = 16
"""The rows whose logits are computed together; fewer are padded, more are padded to a multiple."""
_LEAST = (ROWS, 65, 128)
"""The numbers of rows from which products are tried. Some kernels differ for up to 64."""
_MORE = (0, 1, 48, 113, 256)
"""The numbers of rows above the least that are tried."""
_MOST_OUT = 16384
"""The largest number of columns of a product that are tried; vocabularies have more."""


def independent_from(model: CompiledModel) -> int | None:
    """Return the rows from which products have the same bits for each row, in this model's modules.

    Kernels may choose the order of a sum by the number of rows, so this is measured, with the
    library and the number of threads of this process. None: rows depend on each other.
    """
    weights = [
        _random(min(out, _MOST_OUT), width, model.dtype, model.device)
        for out, width in sorted(_shapes(model))
    ]
    package = TORCH
    if model.backend == MODULES:
        weights = [as_matrix(weight) for weight in weights]
    else:
        package = EXECUTORS[model.backend].functions
    linear = import_module(f"{package}.functions").linear
    for least in _LEAST:
        if all(_independent(linear, weight, least) for weight in weights):
            return least
    return None


def _shapes(model: CompiledModel) -> set[tuple[Any, ...]]:
    """Return the shapes of the weights of linears, on all ranks."""
    weights = {node.args[1] for node in model.graph.graph.nodes if node.target is LINEAR}
    types = [value_type(weight) for weight in weights]
    return {one.local_shape(rank) for one in types for rank in range(model.tp)}


@torch.inference_mode()
def _independent(
    linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], weight: torch.Tensor, least: int
) -> bool:
    """Return whether runs of at least so many rows give the bits of one run of all rows."""
    every = _random(least + max(_MORE), weight.shape[1], weight.dtype, weight.device)
    whole = linear(every, weight)
    runs = [every[-least - more :].clone() for more in _MORE]
    return all(torch.equal(linear(run, weight), whole[-len(run) :]) for run in runs)


def _random(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    dice = torch.Generator().manual_seed(rows * columns)
    return torch.randn(rows, columns, generator=dice).to(device, dtype)
