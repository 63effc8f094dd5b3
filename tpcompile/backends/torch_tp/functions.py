"""What emitted modules call beside torch itself: the references of the dialect's ops."""

from tpcompile.ir.ops.attention import attention
from tpcompile.ir.ops.elementwise import swiglu
from tpcompile.ir.ops.embedding import vocab_embedding
from tpcompile.ir.ops.norm import add_rms_norm, rms_norm
from tpcompile.ir.ops.rotary import rope

__all__ = ["add_rms_norm", "attention", "rms_norm", "rope", "swiglu", "vocab_embedding"]
