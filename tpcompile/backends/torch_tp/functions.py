"""Functions that emitted modules call besides torch: the dialect's references, and linears."""

from tpcompile.backends.torch_tp.matrix import as_matrix, linear
from tpcompile.ir.ops.argmax import argmax, local_argmax
from tpcompile.ir.ops.attention import attention
from tpcompile.ir.ops.elementwise import swiglu
from tpcompile.ir.ops.embedding import vocab_embedding
from tpcompile.ir.ops.few_bits import decoded, decoded_rows
from tpcompile.ir.ops.norm import add_rms_norm, rms_norm
from tpcompile.ir.ops.paged_attention import paged_attention
from tpcompile.ir.ops.rotary import rope

__all__ = [
    "add_rms_norm",
    "argmax",
    "as_matrix",
    "attention",
    "decoded",
    "decoded_rows",
    "linear",
    "local_argmax",
    "paged_attention",
    "rms_norm",
    "rope",
    "swiglu",
    "vocab_embedding",
]
