"""What the checker wants of inputs: the same on every rank, unless it is a KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from tpcompile.ir.check_parameters import check_ranks
from tpcompile.ir.meta import value_type
from tpcompile.ir.ops import PAGED_ATTENTION, SPECS, RuleError
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
    """Whether all that `user` does with an input is to keep K and V in it."""
    if user.target is not PAGED_ATTENTION:
        return False
    return [name for name, arg in _arguments(user).items() if arg is node] == ["cache"]


def shared_layers(graph: fx.Graph) -> Iterator[tuple[fx.Node, RuleError]]:
    """Attentions that keep K and V where another does: each would read the other's."""
    kept: dict[tuple[Any, Any], fx.Node] = {}
    for node in graph.nodes:
        if node.target is PAGED_ATTENTION:
            found = _arguments(node)
            other = kept.setdefault((found["cache"], found["layer"]), node)
            if other is not node:
                got = f"layer {found['layer']} of the cache, which %{other.name} has"
                yield node, RuleError("kv-cache", got, "a layer of the cache for each attention")


def _arguments(node: fx.Node) -> dict[str, Any]:
    return SPECS[PAGED_ATTENTION].bind(node.args, dict(node.kwargs))
