"""Functions that emitted modules call besides torch: the dialect's references, and linears."""

from torch import sigmoid
from torch.nn.functional import gelu, silu, softplus

from tpcompile.backends.torch_tp.matrix import as_matrix, experts, linear, linear_swiglu
from tpcompile.backends.torch_tp.router import Router
from tpcompile.ir.ops.argmax import argmax, local_argmax
from tpcompile.ir.ops.attention import attention
from tpcompile.ir.ops.delta import causal_conv, delta_decay, gated_delta_rule
from tpcompile.ir.ops.elementwise import sigmoid_gate, swiglu
from tpcompile.ir.ops.embedding import vocab_embedding
from tpcompile.ir.ops.few_bits import DecodedExperts, decoded, decoded_rows
from tpcompile.ir.ops.norm import add_rms_norm, gated_rms_norm, rms_norm
from tpcompile.ir.ops.paged_attention import paged_attention
from tpcompile.ir.ops.resumed import resumed_conv, resumed_delta_rule
from tpcompile.ir.ops.rotary import rope

__all__ = [
    "DecodedExperts",
    "Router",
    "add_rms_norm",
    "argmax",
    "as_matrix",
    "attention",
    "causal_conv",
    "decoded",
    "decoded_rows",
    "delta_decay",
    "experts",
    "gated_delta_rule",
    "gated_rms_norm",
    "gelu",
    "linear",
    "linear_swiglu",
    "local_argmax",
    "paged_attention",
    "resumed_conv",
    "resumed_delta_rule",
    "rms_norm",
    "rope",
    "sigmoid",
    "sigmoid_gate",
    "silu",
    "softplus",
    "swiglu",
    "vocab_embedding",
]
