"""Pass `fuse-norm-qkv`."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from tpcompile.ir.meta import operand
from tpcompile.ir.ops import (
    CACHED_ATTENTION,
    NORM_QKV_ROPE_APPEND,
    PAGED_ATTENTION,
    RMS_NORM,
    ROPE,
    SPECS,
)
from tpcompile.rewriting.absorb import check_absorbed, normed_linear, way_back
from tpcompile.rewriting.pattern import Bindings, Call, Maybe, Number, Value, check, match
from tpcompile.rewriting.rewrite import Report, fuse_each, insert, replace

aten = torch.ops.aten


def _heads(part: int) -> Call:
    """Return the pattern of the heads in one part of the fused projection."""
    rows = Call(operator.getitem, (Value("split"), part))
    return Call(aten.unflatten.int, (rows, 1, [-1, Number("width")]))


def _rotated(part: int) -> Call:
    tables = Value("cos"), Value("sin")
    return Call(ROPE, (Maybe(RMS_NORM, _heads(part)), *tables, Number(f"interleaved {part}")))


PATTERN = (_rotated(0), _rotated(1), _heads(2))
"""Queries, keys and values as attention reads them."""
_SPLIT = Call(
    aten.split_with_sizes.default,
    (Value("rows"), [Number("queries"), Number("keys"), Number("values")], 1),
)


@dataclass(frozen=True)
class FuseNormQkv:
    """Compute rotated queries from the residual in one op, which also caches keys and values.

    %n = tpc.rms_norm(%x, %g)
    %q, %k, %v = heads of linear(%n, %w)             %q = tpc.norm_qkv_rope_append(%x, %g, %w,
    %q = tpc.rope(%q, %cos, %sin)              →             %cos, %sin, %cache, %slots, …)
    %k = tpc.rope(%k, %cos, %sin)                    %a = tpc.cached_attention(%q, %cache, …)
    %a = paged_attention(%q, %k, %v, %cache, …)

    After this pass the graph supports only steps with one new token per sequence.
    """

    name: ClassVar[str] = "fuse-norm-qkv"

    def apply(self, gm: fx.GraphModule) -> Report:
        return fuse_each(gm, PAGED_ATTENTION, _fuse)


def _fuse(graph: fx.Graph, attention: fx.Node) -> None:
    read = SPECS[PAGED_ATTENTION].bind(attention.args, dict(attention.kwargs))
    sides: list[fx.Node] = [read["q"], read["k"], read["v"]]
    found = match(PATTERN, sides)
    found |= match(_SPLIT, found["split"])
    linear: fx.Node = found["rows"]
    source = normed_linear(linear)
    scales = [_head_norm(side) for side in sides[:2]]
    inside = {node for side in sides for node in way_back(side, operand(linear))}
    check_absorbed(inside, attention)
    interleaved = [found[f"interleaved {part}"] for part in (0, 1)]
    check(
        len(set(interleaved)) == 1, attention, "queries and keys are rotated in different layouts"
    )
    with graph.inserting_before(attention):
        queries = insert(
            sides[0],
            NORM_QKV_ROPE_APPEND,
            *source,
            *(scale for scale, _ in scales),
            _one_eps(attention, [eps for scale, eps in scales if scale is not None]),
            *(found["cos"], found["sin"], read["cache"], read["slots"]),
            *(read["layer"], read["block"], _head_counts(found)),
            *([True] if interleaved[0] else []),
        )
        replace(sides[0], queries)
        names = SPECS[CACHED_ATTENTION].argument_names[1:-1]
        mixed = insert(attention, CACHED_ATTENTION, queries, *(read[name] for name in names))
    replace(attention, mixed)
    graph.erase_node(attention)


def _head_norm(rotated: fx.Node) -> tuple[fx.Node | None, Any]:
    """Return the scale and epsilon of the per-head norm, or None for both without one."""
    heads = operand(rotated)
    return (operand(heads, 1), heads.args[2]) if heads.target is RMS_NORM else (None, None)


def _one_eps(attention: fx.Node, found: list[float]) -> float:
    check(
        len(set(found)) <= 1, attention, f"its head norms must have the same epsilon, got {found}"
    )
    return found[0] if found else 0.0


def _head_counts(found: Bindings) -> list[int]:
    return [found[name] // found["width"] for name in ("queries", "keys", "values")]
