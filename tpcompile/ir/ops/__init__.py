"""The op dialect: one module per family of ops. Constants such as `LINEAR` are node targets."""

from tpcompile.ir.ops import parts, shape
from tpcompile.ir.ops.activation import Activation
from tpcompile.ir.ops.argmax import ARGMAX
from tpcompile.ir.ops.attention import ATTENTION
from tpcompile.ir.ops.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    COLLECTIVES,
    REDISTRIBUTE,
    REDUCE_SCATTER,
)
from tpcompile.ir.ops.decode import CACHE_OPS, CACHE_WRITERS, DECODE_OPS, STATE_OPS
from tpcompile.ir.ops.decode.attention import (
    ATTENTION_REDUCE,
    CACHED_ATTENTION,
    GATED_ATTENTION_REDUCE,
    PARTIAL_ATTENTION,
)
from tpcompile.ir.ops.decode.delta_step import DELTA_STEP, DELTA_STEP_APART, DELTA_STEPS
from tpcompile.ir.ops.decode.experts import ADD_RESIDUAL, EXPERT_TERMS, NORM_EXPERTS, SHARED_EXPERT
from tpcompile.ir.ops.decode.norm_linear import (
    NORM_GATE_UP_SWIGLU,
    NORM_LINEAR,
    NORM_MLPS,
    NORM_MLPS_APART,
)
from tpcompile.ir.ops.decode.norm_qkv import NORM_Q_K_V_ROPE_APPEND, NORM_QKV_ROPE_APPEND, QKV_OPS
from tpcompile.ir.ops.decode.residual import ALL_REDUCE_RESIDUAL, LINEAR_RESIDUAL
from tpcompile.ir.ops.delta import CAUSAL_CONV, DELTA_DECAY, GATED_DELTA_RULE
from tpcompile.ir.ops.elementwise import ACTIVATIONS, ELEMENTWISE, SIGMOID_GATE, SWIGLU
from tpcompile.ir.ops.embedding import EMBEDDING, EMBEDDINGS, VOCAB_EMBEDDING
from tpcompile.ir.ops.experts import EXPERTS, TOP_EXPERTS
from tpcompile.ir.ops.linear import LINEAR
from tpcompile.ir.ops.norm import ADD_RMS_NORM, GATED_RMS_NORM, RMS_NORM
from tpcompile.ir.ops.paged_attention import PAGED_ATTENTION
from tpcompile.ir.ops.resumed import RESUMED_CONV, RESUMED_DELTA_RULE
from tpcompile.ir.ops.rotary import ROPE, ROPE_PAIRS, ROTARY, TABLES
from tpcompile.ir.ops.spec import (
    SPECS,
    Cost,
    OpSpec,
    RuleError,
    arguments_of,
    op_name,
    package_of,
    spec_of,
)

__all__ = [
    "ACTIVATIONS",
    "ADD_RESIDUAL",
    "ADD_RMS_NORM",
    "ALL_GATHER",
    "ALL_REDUCE",
    "ALL_REDUCE_RESIDUAL",
    "ARGMAX",
    "ATTENTION",
    "ATTENTION_REDUCE",
    "CACHED_ATTENTION",
    "CACHE_OPS",
    "CACHE_WRITERS",
    "CAUSAL_CONV",
    "COLLECTIVES",
    "DECODE_OPS",
    "DELTA_DECAY",
    "DELTA_STEP",
    "DELTA_STEPS",
    "DELTA_STEP_APART",
    "ELEMENTWISE",
    "EMBEDDING",
    "EMBEDDINGS",
    "EXPERTS",
    "EXPERT_TERMS",
    "GATED_ATTENTION_REDUCE",
    "GATED_DELTA_RULE",
    "GATED_RMS_NORM",
    "LINEAR",
    "LINEAR_RESIDUAL",
    "NORM_EXPERTS",
    "NORM_GATE_UP_SWIGLU",
    "NORM_LINEAR",
    "NORM_MLPS",
    "NORM_MLPS_APART",
    "NORM_QKV_ROPE_APPEND",
    "NORM_Q_K_V_ROPE_APPEND",
    "PAGED_ATTENTION",
    "PARTIAL_ATTENTION",
    "QKV_OPS",
    "REDISTRIBUTE",
    "REDUCE_SCATTER",
    "RESUMED_CONV",
    "RESUMED_DELTA_RULE",
    "RMS_NORM",
    "ROPE",
    "ROPE_PAIRS",
    "ROTARY",
    "SHARED_EXPERT",
    "SIGMOID_GATE",
    "SPECS",
    "STATE_OPS",
    "SWIGLU",
    "TABLES",
    "TOP_EXPERTS",
    "VOCAB_EMBEDDING",
    "Activation",
    "Cost",
    "OpSpec",
    "RuleError",
    "arguments_of",
    "op_name",
    "package_of",
    "parts",
    "shape",
    "spec_of",
]
