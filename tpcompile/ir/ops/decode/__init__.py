"""The instruction groups of a decode step as ops: each node becomes instructions of one group.

In a decode graph every sequence has exactly one new token, so token `t` is the last token of
sequence `t`. The sequence has `lengths[t]` tokens and is stored in the blocks `tables[t]`; the new
token is stored in `slots[t]`.
"""

from tpcompile.ir.ops.decode.attention import (
    ATTENTION_REDUCE,
    CACHED_ATTENTION,
    GATED_ATTENTION_REDUCE,
    PARTIAL_ATTENTION,
    merge,
    merge_spans,
    span_of,
)
from tpcompile.ir.ops.decode.delta_step import DELTA_STEPS
from tpcompile.ir.ops.decode.experts import ADD_RESIDUAL, EXPERT_TERMS
from tpcompile.ir.ops.decode.norm_linear import NORM_LINEAR, NORM_MLPS, NORM_MLPS_APART
from tpcompile.ir.ops.decode.norm_qkv import QKV_OPS
from tpcompile.ir.ops.decode.residual import ALL_REDUCE_RESIDUAL, LINEAR_RESIDUAL
from tpcompile.ir.ops.paged_attention import PAGED_ATTENTION
from tpcompile.ir.ops.resumed import RESUMED_CONV, RESUMED_DELTA_RULE

CACHE_WRITERS = (PAGED_ATTENTION, *QKV_OPS)
"""The ops that write keys and values to a KV cache, one per layer."""
STATE_OPS = {
    RESUMED_CONV: ("tails",),
    RESUMED_DELTA_RULE: ("states",),
    **dict.fromkeys(DELTA_STEPS, ("tails", "states")),
}
"""The ops that read and write states of linear attention, and the operands that hold these."""
CACHE_OPS = (*CACHE_WRITERS, CACHED_ATTENTION, PARTIAL_ATTENTION)
"""The ops that read or write a KV cache."""
DECODE_OPS = (
    *QKV_OPS,
    CACHED_ATTENTION,
    PARTIAL_ATTENTION,
    ATTENTION_REDUCE,
    GATED_ATTENTION_REDUCE,
    *DELTA_STEPS,
    LINEAR_RESIDUAL,
    ALL_REDUCE_RESIDUAL,
    *NORM_MLPS.values(),
    *NORM_MLPS_APART.values(),
    NORM_LINEAR,
    *EXPERT_TERMS,
    ADD_RESIDUAL,
)
"""The ops that occur only in decode graphs."""

__all__ = [
    "CACHE_OPS",
    "CACHE_WRITERS",
    "DECODE_OPS",
    "STATE_OPS",
    "merge",
    "merge_spans",
    "span_of",
]
