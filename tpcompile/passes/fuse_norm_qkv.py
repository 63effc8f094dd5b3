"""Pass `fuse-norm-qkv`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from tpcompile.ir.meta import value_type
from tpcompile.ir.ops import (
    CACHED_ATTENTION,
    LINEAR,
    NORM_Q_K_V_ROPE_APPEND,
    NORM_QKV_ROPE_APPEND,
    PAGED_ATTENTION,
    SPECS,
    arguments_of,
)
from tpcompile.ir.values.attending import ONE_NEW_TOKEN
from tpcompile.ir.values.scope import Rewrite
from tpcompile.rewriting.rewrite import Report, absorbed, fuse_each, insert_bound, replace
from tpcompile.rewriting.structure import head_ops

_STORED = ("q", "k", "v", "cache", "slots", "layer", "block")
"""The arguments of attention that describe its write to the cache, as in a pattern."""


@dataclass(frozen=True)
class FuseNormQkv:
    """Compute rotated queries from the residual in one op, which also caches keys and values.

    %n = tpc.rms_norm(%x, %g)
    %q, %k, %v = heads of linear(%n, %w)             %q = tpc.norm_qkv_rope_append(%x, %g, %w,
    %q = tpc.rope(%q, %cos, %sin)              →             %cos, %sin, %cache, %slots, …)
    %k = tpc.rope(%k, %cos, %sin)                    %a = tpc.cached_attention(%q, %cache, …)
    %a = paged_attention(%q, %k, %v, %cache, …)

    If queries, keys and values come from separate linears, for example of weights in different
    formats, the op is `tpc.norm_q_k_v_rope_append`, which has three weights.

    After this pass the graph supports only steps with one new token per sequence.
    """

    name: ClassVar[str] = "fuse-norm-qkv"
    rewrites: ClassVar[tuple[Rewrite, ...]] = (ONE_NEW_TOKEN,)

    def apply(self, gm: fx.GraphModule) -> Report:
        return fuse_each(gm, PAGED_ATTENTION, _fuse)


def _fuse(graph: fx.Graph, attention: fx.Node) -> None:
    read = arguments_of(attention)
    stored = [read[name] for name in _STORED]
    sources = head_ops(read["q"])[-1].all_input_nodes
    apart = any(source.target is LINEAR for source in sources)
    target = NORM_Q_K_V_ROPE_APPEND if apart else NORM_QKV_ROPE_APPEND
    bindings = absorbed(list(SPECS[target].pattern.args), stored, attention)
    bindings.setdefault("head_eps", 0.0)
    bindings["heads"] = [value_type(heads).shape[1] for heads in stored[:3]]
    with graph.inserting_before(attention):
        queries = insert_bound(read["q"], target, bindings)
        replace(read["q"], queries)
        mixed = insert_bound(attention, CACHED_ATTENTION, {**read, "q": queries})
    replace(attention, mixed)
    graph.erase_node(attention)
