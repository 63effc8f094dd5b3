"""Failures of passes on a graph, described in a form that is the same for smaller graphs."""

from __future__ import annotations

import re
import traceback
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from tpcompile.errors import CompileError, UsageError
from tpcompile.ir.meta import parameter_of, parameters, value_type
from tpcompile.ir.ops import DECODE_OPS
from tpcompile.ir.recipe import tensors_of
from tpcompile.ir.simulate import logits_of, materialise, run_ranks
from tpcompile.rewriting.manager import FailedPassError, Pass, run_passes

_NAMES = re.compile(r"%\w+|\d+")
_INPUTS = (
    *("input_ids", "positions", "starts", "logit_rows"),
    *("cache", "slots", "tables", "lengths"),
)
_STARTS = (0, 3, 5)
"""The starts of two sequences of three and two tokens."""


def error_of_passes(passes: Sequence[Pass]) -> Callable[[fx.GraphModule], str]:
    """Return a function that runs passes, and returns the first error without its names."""

    def error_of(gm: fx.GraphModule) -> str:
        return _run(gm, passes)[1]

    return error_of


def _run(gm: fx.GraphModule, passes: Sequence[Pass]) -> tuple[fx.GraphModule, str]:
    """Run passes up to the first that fails; return the graph before it and its error, or ""."""
    for current in passes:
        try:
            gm, _ = run_passes(gm, [current])
        except FailedPassError as error:
            return gm, f"{current.name}: {error.problems[0].rule}"
        except CompileError as error:
            message = _NAMES.sub("", error.message)
            return gm, f"{current.name}: {type(error).__name__} {message}"
        except Exception as error:
            return gm, f"{current.name}: {_place_of(error)}"
    return gm, ""


def _place_of(error: Exception) -> str:
    """Return the class of an error and the function that raised it."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {place.name}"


def error_of_numbers(
    passes: Sequence[Pass], tables: Callable[..., Any], tolerance: float
) -> Callable[[fx.GraphModule], str]:
    """Return a function that compares the first result before and after the passes.

    Weights and inputs are random, and the same for every graph.
    """

    def error_of(gm: fx.GraphModule) -> str:
        after, failed = _run(gm, passes)
        if failed:
            return failed
        one_by_one = any(node.target in DECODE_OPS for node in after.graph.nodes)
        try:
            expected, actual = (_result(graph, one_by_one, tables) for graph in (gm, after))
        except Exception as error:
            return f"cannot be run: {_place_of(error)}"
        difference = (actual - expected).abs().max()
        return "" if bool(difference <= tolerance * expected.abs().max()) else "wrong numbers"

    return error_of


def check_inputs(gm: fx.GraphModule) -> None:
    """Refuse a graph with inputs that cannot be generated, such as values that became inputs."""
    for node in gm.graph.nodes:
        if node.op == "placeholder" and node.name not in _INPUTS:
            raise UsageError(
                f"Values for the input %{node.name} cannot be generated",
                expected=f"inputs of a captured model: {', '.join(_INPUTS)}",
            )


def _result(gm: fx.GraphModule, one_by_one: bool, tables: Callable[..., Any]) -> torch.Tensor:
    starts = torch.arange(_STARTS[-1] + 1) if one_by_one else torch.tensor(_STARTS)
    lengths = starts.diff()
    first = torch.repeat_interleave(starts[:-1], lengths)
    tokens = torch.arange(_STARTS[-1])
    inputs = {
        "input_ids": tokens * 7 + 1,
        "positions": tokens - first,
        "starts": starts,
        "logit_rows": tokens,
    }
    with torch.inference_mode():
        values = run_ranks(gm, inputs, materialise(gm, _read(gm)), tables)
    return logits_of(values)[0].float()


def _read(gm: fx.GraphModule) -> Callable[[str, tuple[slice, ...]], torch.Tensor]:
    """Return a function that reads random weights; a tensor depends only on its name."""
    shapes = {
        tensor.name: (tensor.shape, value_type(node).dtype)
        for node in parameters(gm.graph)
        for tensor in tensors_of(parameter_of(node).whole)
    }

    def read(name: str, part: tuple[slice, ...]) -> torch.Tensor:
        shape, dtype = shapes[name]
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        scale = 0.1 if len(shape) == 1 else shape[-1] ** -0.5
        values = torch.randn(shape, generator=generator) * scale + (len(shape) == 1)
        return values.to(dtype)[part]

    return read
