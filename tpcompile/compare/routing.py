"""The choices of experts on each side of a comparison: read, and replaced by eager's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from tpcompile.errors import UnsupportedError
from tpcompile.ir.meta import operand, origin_of
from tpcompile.ir.ops import TOP_EXPERTS, spec_of
from tpcompile.ir.ops.experts import Routed, replayed
from tpcompile.ir.simulate import Values

aten = torch.ops.aten

Experts = Mapping[int, torch.Tensor]
"""The experts of each token, by layer."""
_TOPK = (torch.topk, torch.Tensor.topk)


def choices_in(graph: fx.Graph) -> dict[int, fx.Node]:
    """Return the ops that choose experts, by layer. Before `raise-experts` each is a `topk`."""
    choices = {}
    for node in graph.nodes:
        if node.target in _REPLAYED:
            layer = origin_of(node).layer
            assert layer is not None
            choices[layer] = node
    return choices


def routers_in(graph: fx.Graph) -> dict[int, str]:
    """Return the modules of the routers in the Hugging Face model, by layer."""
    return {layer: origin_of(node).module for layer, node in choices_in(graph).items()}


@contextmanager
def routed(
    model: Any, routers: Mapping[int, str], experts: Experts | None = None
) -> Iterator[dict[int, Routed]]:
    """Record the choices of a Hugging Face model's routers by layer, in the order of their calls.

    With `experts`, routers choose these, and compute the scores from their own logits.
    """
    recorded: dict[int, Routed] = {}
    with ExitStack() as stack:
        for layer, path in routers.items():
            router = model.get_submodule(path)
            chosen = None if experts is None else experts[layer]
            stack.enter_context(_routed(router, recorded, layer, chosen))
        yield recorded


@contextmanager
def _routed(
    router: Any, recorded: dict[int, Routed], layer: int, experts: torch.Tensor | None
) -> Iterator[None]:
    original = router.forward

    def forward(*args: Any, **options: Any) -> Any:
        with ExitStack() as stack:
            if experts is not None:
                stack.enter_context(_FixedChoice(experts))
            output = original(*args, **options)
        if experts is not None and not torch.equal(output[2], experts):
            raise UnsupportedError(
                f"{type(router).__name__} does not choose experts by torch.topk",
                hint="Give a tolerance, so that no reference in fp32 is needed",
            )
        recorded[layer] = Routed(*(value.detach() for value in output[:3]))
        return output

    before = {"forward": original} if "forward" in vars(router) else {}
    router.forward = forward
    try:
        yield
    finally:
        del router.forward
        vars(router).update(before)


class _FixedChoice(TorchFunctionMode):
    """A mode in which `topk` returns the values at given places."""

    def __init__(self, ids: torch.Tensor) -> None:
        super().__init__()
        self._ids = ids

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _TOPK:
            return args[0].gather(-1, self._ids), self._ids
        return func(*args, **(kwargs or {}))


class Replay:
    """Functions that replace the choices of a graph by given ones, and record its own.

    `run_ranks` takes them as `instead`.
    """

    def __init__(self, graph: fx.Graph, experts: Experts) -> None:
        self._choices = choices_in(graph) if experts else {}
        self._recorded: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.instead: dict[Any, Callable[..., Any]] = {
            node: self._choice(layer, node, experts[layer]) for layer, node in self._choices.items()
        }

    def _choice(self, layer: int, node: fx.Node, experts: torch.Tensor) -> Callable[..., Any]:
        spec, replay = spec_of(node), _REPLAYED[node.target]
        assert spec is not None
        pairs = self._recorded[layer] = []

        def choose(**bound: Any) -> tuple[torch.Tensor, torch.Tensor]:
            scores, ids = spec.call(bound)
            pairs.append((scores, ids))
            return replay(bound, scores, ids, experts), experts

        return choose

    def own_choices(self, values: Values) -> dict[int, list[Routed]]:
        """Return the graph's own choices of each rank by layer, given all values of the graph."""
        choices = {}
        for layer, node in self._choices.items():
            logits = operand(node) if node.target is TOP_EXPERTS else operand(operand(node))
            pairs = zip(values[logits], self._recorded[layer], strict=True)
            choices[layer] = [Routed(rank_logits, *chosen) for rank_logits, chosen in pairs]
        return choices


def _replayed(
    bound: Mapping[str, Any], scores: torch.Tensor, ids: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    choice = Routed(bound["logits"], scores, ids)
    return replayed(choice, experts, bound["normalized"])


def _gathered(
    bound: Mapping[str, Any], scores: torch.Tensor, ids: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    shares: torch.Tensor = bound["self"]
    return shares.gather(-1, experts)


_REPLAYED = {TOP_EXPERTS: _replayed, aten.topk.default: _gathered}
"""The function that computes the scores of given experts, by the op that chooses."""
