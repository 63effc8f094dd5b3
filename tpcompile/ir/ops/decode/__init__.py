"""The instruction groups of a decode step as ops: what their nodes become is an instruction each.

A decode graph is for steps in which every sequence has one new token, so that token `t` is the
last of sequence `t`: of `lengths[t]` tokens, in the blocks `tables[t]`, itself in `slots[t]`.
"""

from tpcompile.ir.ops.decode.attention import (
    ATTENTION_REDUCE,
    CACHED_ATTENTION,
    PARTIAL_ATTENTION,
    merge,
    merge_spans,
    span_of,
)
from tpcompile.ir.ops.decode.norm_linear import NORM_GATE_UP_SWIGLU, NORM_LINEAR
from tpcompile.ir.ops.decode.norm_qkv import NORM_QKV_ROPE_APPEND
from tpcompile.ir.ops.decode.residual import ALL_REDUCE_RESIDUAL, LINEAR_RESIDUAL
from tpcompile.ir.ops.paged_attention import PAGED_ATTENTION

CACHE_WRITERS = (PAGED_ATTENTION, NORM_QKV_ROPE_APPEND)
"""The ops that put keys and values into a KV cache: one for each layer of it."""
CACHE_OPS = (*CACHE_WRITERS, CACHED_ATTENTION, PARTIAL_ATTENTION)
"""The ops that read or write a KV cache."""
DECODE_OPS = (
    NORM_QKV_ROPE_APPEND,
    CACHED_ATTENTION,
    PARTIAL_ATTENTION,
    ATTENTION_REDUCE,
    LINEAR_RESIDUAL,
    ALL_REDUCE_RESIDUAL,
    NORM_GATE_UP_SWIGLU,
    NORM_LINEAR,
)
"""What only graphs of a decode step have."""

__all__ = [
    "ALL_REDUCE_RESIDUAL",
    "ATTENTION_REDUCE",
    "CACHED_ATTENTION",
    "CACHE_OPS",
    "CACHE_WRITERS",
    "DECODE_OPS",
    "LINEAR_RESIDUAL",
    "NORM_GATE_UP_SWIGLU",
    "NORM_LINEAR",
    "NORM_QKV_ROPE_APPEND",
    "PARTIAL_ATTENTION",
    "merge",
    "merge_spans",
    "span_of",
]
