"""The choices of a module's routers: read, and replaced by given ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import fx, nn

from tpcompile.backends.torch_tp import Router
from tpcompile.ir.meta import OUTPUTS, operand, value_type
from tpcompile.ir.ops import TOP_EXPERTS, arguments_of
from tpcompile.ir.ops.experts import Routed, replayed
from tpcompile.runtime.ranks.step import Routing, Step


@dataclass(frozen=True)
class RouterShape:
    """The number of experts that a router chooses from, and the number that a token chooses."""

    experts: int
    chosen: int
    dtype: torch.dtype

    def sides(self, tokens: int) -> Iterator[tuple[tuple[int, int], torch.dtype]]:
        """Yield the shapes and dtypes of logits, scores and numbers."""
        yield (tokens, self.experts), self.dtype
        yield (tokens, self.chosen), self.dtype
        yield (tokens, self.chosen), torch.int64


def routers_of(graph: fx.Graph) -> Iterator[RouterShape]:
    """Yield the routers of a graph, in the order in which it calls them."""
    for node in graph.nodes:
        if node.target is TOP_EXPERTS:
            logits = value_type(operand(node))
            yield RouterShape(logits.extent(-1), arguments_of(node)["count"], logits.dtype)


def run_routed(module: nn.Module, inputs: Mapping[str, Any], routing: Routing) -> torch.Tensor:
    """Run a module; return the bytes of its result, followed by its routers' choices.

    The choices are the routers' own, also if given ones replace them.
    """
    choices: list[Routed] = []

    def choose(_: nn.Module, args: Any, output: Any) -> Any:
        logits, _, normalized = args
        routed = Routed(logits, *output)
        choices.append(routed)
        if not routing.experts:
            return output
        experts = routing.experts[len(choices) - 1].to(logits.device)
        return replayed(routed, experts, normalized), experts

    with ExitStack() as stack:
        for router in module.modules():
            if isinstance(router, Router):
                stack.callback(router.register_forward_hook(choose).remove)
        result = module(**inputs)
    return torch.cat([*map(bytes_of, (result, *chain(*choices)))])


def unpacked(
    packed: torch.Tensor, step: Step, dtype: torch.dtype, routers: Sequence[RouterShape]
) -> tuple[torch.Tensor, list[Routed]]:
    """Return the result of `run_routed`, and the choices of the routers.

    `dtype` is that of logits.
    """
    inputs = step.inputs
    kinds = [[*router.sides(len(inputs["input_ids"]))] for router in routers]
    trailing = sum(_size(*kind) for sides in kinds for kind in sides)
    start = len(packed) - trailing
    result = packed[:start].clone()
    choices = []
    for sides in kinds:
        parts = []
        for shape, kind in sides:
            stop = start + _size(shape, kind)
            parts.append(packed[start:stop].clone().view(kind).view(shape))
            start = stop
        choices.append(Routed(*parts))
    if step.output != OUTPUTS[0]:
        return result.view(torch.int64), choices
    return result.view(dtype).view(len(inputs["logit_rows"]), -1), choices


def _size(shape: tuple[int, int], dtype: torch.dtype) -> int:
    return shape[0] * shape[1] * dtype.itemsize


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor as bytes."""
    return tensor.contiguous().view(-1).view(torch.uint8)
