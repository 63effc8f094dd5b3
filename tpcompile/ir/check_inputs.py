"""What the checker wants of inputs: the same on every rank, unless it is a KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from tpcompile.ir.check_parameters import check_ranks
from tpcompile.ir.meta import value_type
from tpcompile.ir.ops import CACHE_OPS, CACHE_WRITERS, SPECS, RuleError
from tpcompile.ir.types import REPLICATE, Shard


def check_input(node: fx.Node, ranks: int) -> None:
    """Every rank gets the same, but for a KV cache, which lies as the keys do."""
    kind = value_type(node)
    cache = bool(node.users) and all(_is_cache(node, user) for user in node.users)
    if kind.placement != REPLICATE and not (cache and isinstance(kind.placement, Shard)):
        raise RuleError("input", str(kind), "inputs on every rank")
    refusal = kind.refusal()
    if refusal:
        raise RuleError("layout", refusal, "a layout in which some rank holds each unit")
    check_ranks(kind, ranks)


def _is_cache(node: fx.Node, user: fx.Node) -> bool:
    """Whether all that `user` does with an input is to keep K and V in it, or to read them."""
    if user.target not in CACHE_OPS:
        return False
    return [name for name, arg in _arguments(user).items() if arg is node] == ["cache"]


def shared_layers(graph: fx.Graph) -> Iterator[tuple[fx.Node, RuleError]]:
    """Ops that keep K and V where another does, and ops that read what nobody has kept yet."""
    kept: dict[tuple[Any, Any], fx.Node] = {}
    for node in graph.nodes:
        if node.target not in CACHE_OPS:
            continue
        found = _arguments(node)
        place = found["cache"], found["layer"]
        if node.target not in CACHE_WRITERS:
            if place not in kept:
                got = f"layer {found['layer']} of the cache, in which nothing was kept before"
                yield node, RuleError("kv-cache", got, "the step's keys and values kept first")
        elif (other := kept.setdefault(place, node)) is not node:
            got = f"layer {found['layer']} of the cache, which %{other.name} has"
            yield node, RuleError("kv-cache", got, "a layer of the cache for each attention")


def _arguments(node: fx.Node) -> dict[str, Any]:
    return SPECS[node.target].bind(node.args, dict(node.kwargs))
