"""Which passes a pass wants before it, and which after it, to say so where it refuses a graph.

A pass runs wherever its graph allows: the tables explain a refusal, they forbid no order.
"""

from __future__ import annotations

from collections.abc import Sequence

_HEADS = ("canonicalize", "raise-norm", "raise-rope")
_FUSED_LINEARS = ("fuse-qkv", "fuse-gate-up", "cache-kv", "fuse-norm-qkv", "fuse-norm-gate-up")
_SHARDED = (*_FUSED_LINEARS, "fuse-norm-linear", "fuse-residual")

AFTER: dict[str, tuple[str, ...]] = {
    "raise-norm": ("canonicalize",),
    "raise-rope": ("canonicalize",),
    "raise-attention": _HEADS,
    "plan-sharding": (*_HEADS, "raise-attention"),
    "shard-linears": ("plan-sharding",),
    "kv-heads": ("plan-sharding", "shard-linears"),
    "vocab-parallel": ("plan-sharding",),
    "greedy-head": ("canonicalize",),
    "cache-kv": ("canonicalize", "raise-attention"),
    "interleave-rotary": (*_HEADS, "raise-attention"),
}
"""What makes the nodes that a pass looks for."""

BEFORE: dict[str, tuple[str, ...]] = {
    "raise-norm": ("fuse-add-norm", "fuse-norm-linear"),
    "raise-rope": ("fuse-norm-qkv",),
    "raise-swiglu": ("fuse-norm-gate-up",),
    "raise-attention": ("cache-kv",),
    "plan-sharding": _SHARDED,
    "shard-linears": _SHARDED,
    "kv-heads": _SHARDED,
    "vocab-parallel": ("fuse-norm-linear",),
    "interleave-rotary": ("fuse-qkv", "fuse-norm-qkv"),
}
"""What takes in the nodes that a pass looks for."""


def order_refusal(name: str, done: Sequence[str]) -> str:
    """How the passes that ran before `name` differ from those it wants; empty if they do not."""
    missing = [other for other in AFTER.get(name, ()) if other not in done]
    early = [other for other in BEFORE.get(name, ()) if other in done]
    wants = [
        f"{word} {_listed(others)}"
        for word, others in (("after", missing), ("before", early))
        if others
    ]
    return f"{name} must run {' and '.join(wants)}." if wants else ""


def _listed(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
