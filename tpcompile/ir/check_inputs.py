"""Checks of graph inputs, of results of ops, and of the order in which ops use the KV cache."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch import fx

from tpcompile.ir.check_parameters import check_ranks
from tpcompile.ir.meta import operand, origin_of, value_type
from tpcompile.ir.ops import (
    CACHE_OPS,
    CACHE_WRITERS,
    PARTIAL_ATTENTION,
    QKV_OPS,
    STATE_OPS,
    RuleError,
    arguments_of,
)
from tpcompile.ir.roles import CacheOf, StatesOf
from tpcompile.ir.types import REPLICATE, Shard


def check_input(node: fx.Node, ranks: int) -> None:
    """Refuse an input that is not replicated, unless it is a state that is sharded by heads."""
    kind = value_type(node)
    known = kind.role is None or isinstance(kind.role, CacheOf | StatesOf)
    if not known:
        raise RuleError("input", str(kind), "an input without a role, or a state")
    if kind.format is not None and not isinstance(kind.role, CacheOf):
        raise RuleError("input", str(kind), "an input without a format, or a KV cache")
    state = bool(node.users) and all(_is_state(node, user) for user in node.users)
    if kind.placement != REPLICATE and not (state and isinstance(kind.placement, Shard)):
        raise RuleError("input", str(kind), "a replicated input, or a sharded state")
    refusal = kind.refusal()
    if refusal:
        raise RuleError("layout", refusal, "a layout in which each unit is on some rank")
    check_ranks(kind, ranks)


def _is_state(node: fx.Node, user: fx.Node) -> bool:
    """Return whether `user` uses an input only as its KV cache, or as its states."""
    states = ("cache",) if user.target in CACHE_OPS else STATE_OPS.get(user.target)
    if states is None:
        return False
    used = [name for name, arg in arguments_of(user).items() if arg is node]
    return len(used) == 1 and used[0] in states


def strayed_items(graph: fx.Graph) -> Iterator[tuple[fx.Node, RuleError]]:
    """Yield an error for each result of an op that is taken in another layer than the op's.

    A layer is emitted as a function of its own, whose results are named where they are computed.
    """
    sections: dict[fx.Node, int] = {}
    layer: int | None = None
    section = 0
    for node in graph.nodes:
        if not node.op.startswith("call"):
            continue
        if node.target is not operator.getitem:
            if origin_of(node).layer != layer:
                layer, section = origin_of(node).layer, section + 1
            sections[node] = section
        elif sections.get(operand(node)) != section:
            got = f"a result of %{operand(node).name}, an op of another layer"
            yield node, RuleError("item", got, "a result of an op of the same layer")


def shared_layers(graph: fx.Graph) -> Iterator[tuple[fx.Node, RuleError]]:
    """Yield an error for each op that violates the order of a step.

    Each layer of the cache is written once, then read once, one layer after the other, and every
    result of a read is used.
    """
    writers = [node for node in graph.nodes if node.target in CACHE_WRITERS]
    yield from _written_twice(writers)
    resumed = [node for node in graph.nodes if node.target in STATE_OPS]
    yield from _written_twice(resumed)
    yield from _other_numbers(resumed)
    written: set[Any] = set()
    read: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if node.target not in CACHE_OPS:
            continue
        place = _place(node)
        if node.target in CACHE_WRITERS:
            written.add(place)
        elif place not in written:
            got = f"a read of layer {place[1]} of the cache before any write"
            yield node, RuleError("kv-cache", got, "a write of keys and values before the read")
        elif (other := read.setdefault(place, node)) is not node:
            got = f"layer {place[1]} of the cache, which %{other.name} reads too"
            yield node, RuleError("kv-cache", got, "one attention op per layer of the cache")
    for node in writers:
        if node.target in QKV_OPS and _place(node) not in read:
            got = f"layer {_place(node)[1]} of the cache, which no attention op reads"
            yield node, RuleError("kv-cache", got, "one attention op per layer of the cache")
    yield from _spans_left(graph)


def _written_twice(writers: list[fx.Node]) -> Iterator[tuple[fx.Node, RuleError]]:
    """Yield an error for each op that writes a layer of a state twice or out of order."""
    first_writers: dict[Any, fx.Node] = {}
    last: dict[Any, int] = {}
    for node, place in ((writer, place) for writer in writers for place in _places(writer)):
        cache, layer = place
        rule, noun = ("states", "states") if node.target in STATE_OPS else ("kv-cache", "cache")
        if (other := first_writers.setdefault(place, node)) is not node:
            got = f"layer {layer} of the {noun}, which %{other.name} writes too"
            yield node, RuleError(rule, got, f"one layer of the {noun} per {_MIXERS[rule]}")
        elif last.setdefault(cache, layer) > layer:
            got = f"layer {layer} of the {noun} after layer {last[cache]}"
            yield node, RuleError(rule, got, "writes in the order of the model's layers")
        else:
            last[cache] = layer


def _other_numbers(resumed: list[fx.Node]) -> Iterator[tuple[fx.Node, RuleError]]:
    """Yield an error for each op with states that takes another input as numbers of these.

    The inputs have the same type: only their names, by which steps give them, tell them apart.
    """
    for node in resumed:
        arguments = arguments_of(node)
        for name in ("starts", "lengths", "read", "write"):
            number = arguments.get(name)
            if number is None:  # a decode step has one token per sequence
                continue
            if number.op != "placeholder" or number.name != name:
                yield node, RuleError("states", f"%{number.name} as {name}", f"the input %{name}")


_MIXERS = {"kv-cache": "attention op", "states": "op of linear attention"}


def _spans_left(graph: fx.Graph) -> Iterator[tuple[fx.Node, RuleError]]:
    """Yield an error for each partial attention whose spans are not merged exactly once."""
    for node in graph.nodes:
        if node.target is PARTIAL_ATTENTION:
            merged = {reader for item in node.users for reader in item.users}
            if len(merged) != 1:
                got = f"the spans of %{node.name}, which {len(merged)} nodes read"
                yield node, RuleError("spans", got, "one attention_reduce for the spans of a layer")


def _place(node: fx.Node) -> tuple[Any, int]:
    """Return the cache that an op uses, and the layer within it."""
    ((cache, layer),) = _places(node)
    return cache, layer


def _places(node: fx.Node) -> Iterator[tuple[Any, int]]:
    """Yield the cache or the states that an op uses, and the layer within them."""
    arguments = arguments_of(node)
    for name in STATE_OPS.get(node.target, ("cache",)):
        yield arguments[name], arguments["layer"]
