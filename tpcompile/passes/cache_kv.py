"""Pass `cache-kv`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from tpcompile.errors import PassError, UsageError, did_you_mean
from tpcompile.ir.format import Format
from tpcompile.ir.kv import KV_FORMATS
from tpcompile.ir.layout import TokenLayout
from tpcompile.ir.meta import operand, origin_of, value_type
from tpcompile.ir.ops import ATTENTION, CACHE_WRITERS, PAGED_ATTENTION, arguments_of
from tpcompile.ir.ops.cache import HEADS
from tpcompile.ir.roles import CacheOf
from tpcompile.ir.types import Dim, Partial, Shard, ValueType
from tpcompile.ir.values.attending import WITHOUT_PAST
from tpcompile.ir.values.scope import Rewrite
from tpcompile.rewriting.rewrite import Report, calls, insert_bound, insert_input, replace

CACHE = "cache"
"""The input with the keys and values of all layers, for the rank's KV heads."""
MODEL_KV = "model"
"""The option for keys and values in the model's dtype."""


def kv_format(kv: str) -> Format | None:
    """Return the format of rows of the cache, None for the model's dtype."""
    names = (MODEL_KV, *KV_FORMATS)
    if kv not in names:
        raise UsageError(
            f"kv must be one of {', '.join(names)}, got {kv!r}", hint=did_you_mean(kv, names)
        )
    return KV_FORMATS.get(kv)


@dataclass(frozen=True)
class CacheKv:
    """Store keys and values in blocks of a cache, which becomes an input of the graph.

    The cache has a layer for each attention, so none for layers of linear attention.

    Run it after every pass that shards the graph or looks for attention.

        %k = …                               i64[T] %slots, i64[N, B] %tables, i64[N] %lengths
        %a = attention(%q, %k, %v,           bf16[layers, 2, C, kv_heads, width] %cache, like %k
                       %starts, …)     →     %a = paged_attention(%q, %k, %v, %cache, %starts,
                                                                  %slots, %tables, %lengths, …)
    """

    name: ClassVar[str] = "cache-kv"
    after: ClassVar[tuple[str, ...]] = ("canonicalize", "raise-attention")
    rewrites: ClassVar[tuple[Rewrite, ...]] = (WITHOUT_PAST,)
    block: int = 32
    """Number of tokens per block."""
    kv: str = MODEL_KV
    """The storage of keys and values: the dtype of the `model`, or `int8`."""

    def apply(self, gm: fx.GraphModule) -> Report:
        if self.block < 1:
            raise UsageError(f"block must be at least 1 token, got {self.block}")
        stored = kv_format(self.kv)
        attentions = calls(gm, ATTENTION)
        if not attentions:
            return Report()
        cache = _cache_type(attentions, self.block, stored)
        inputs = _new_inputs(gm.graph, cache, value_type(attentions[0]).shape[0])
        for layer, node in enumerate(attentions):
            bound = {**arguments_of(node), **inputs, "layer": layer, "block": self.block}
            with gm.graph.inserting_before(node):
                new = insert_bound(node, PAGED_ATTENTION, bound)
            replace(node, new)
            gm.graph.erase_node(node)
        return Report(matches=len(attentions))


def _cache_type(attentions: list[fx.Node], block: int, stored: Format | None) -> ValueType:
    """Return the type of the cache; it serves all layers, so their keys must have one type."""
    kind = common_type("keys", {node: value_type(operand(node, 1)) for node in attentions})
    by_token = isinstance(kind.placement, Shard) and isinstance(kind.placement.layout, TokenLayout)
    if kind.dims != 3 or by_token or isinstance(kind.placement, Partial):
        raise PassError(
            f"The keys of %{attentions[0].name} cannot be cached",
            where=str(origin_of(attentions[0])),
            got=str(kind),
            expected="k[T, kv_heads, width], replicated or sharded by head",
            hint="Put cache-kv after raise-attention and the sharding passes",
        )
    shape = (len(attentions), 2, "C", *kind.shape[1:])
    cache = ValueType(shape, kind.dtype, role=CacheOf(block), format=stored)
    layout = kind.layout_of(1)
    return cache if layout is None else cache.sharded(HEADS, layout)


def common_type(noun: str, kinds: Mapping[fx.Node, ValueType]) -> ValueType:
    """Return the type that all nodes have for their keys or states. Raise if there are several."""
    first, kind = next(iter(kinds.items()))
    for node, other in kinds.items():
        if other != kind:
            raise PassError(
                f"The {noun} of %{node.name} must have the type of the {noun} of %{first.name}",
                where=str(origin_of(node)),
                got=str(other),
                expected=str(kind),
            )
    return kind


def _new_inputs(graph: fx.Graph, cache: ValueType, tokens: Dim) -> dict[str, fx.Node]:
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    kinds = {
        "slots": ValueType((tokens,), torch.long),
        "tables": ValueType(("N", "B"), torch.long),
        "lengths": ValueType(("N",), torch.long),
        CACHE: cache,
    }
    return {name: insert_input(last, name, kind) for name, kind in reversed(kinds.items())}


def stored_format(gm: fx.GraphModule) -> Format | None:
    """Return the format of the rows of the graph's cache, None without a cache or a format."""
    for node in gm.graph.nodes:
        if node.target in CACHE_WRITERS:
            return value_type(arguments_of(node)["cache"]).format
    return None


def block_size(gm: fx.GraphModule) -> int:
    """Return the number of tokens per block of the graph's cache."""
    for node in gm.graph.nodes:
        if node.target in CACHE_WRITERS:
            return int(arguments_of(node)["block"])
    raise PassError("The graph has no KV cache", hint="Add cache-kv to the pipeline")
