"""Ordering rules of passes, used to explain why a pass refused a graph.

The tables only explain refusals. They do not restrict the order: a pass runs on every graph that
fits it.
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
"""The passes that make the nodes that a pass looks for."""

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
"""The passes that absorb the nodes that a pass looks for."""


def order_refusal(name: str, done: Sequence[str]) -> str:
    """Return the ordering rules that `name` breaks after the passes in `done`, if any, as text."""
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
