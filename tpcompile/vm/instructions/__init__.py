"""The instructions of a decode step."""

from tpcompile.vm.instructions.attention import AttentionReduce, PartialAttention
from tpcompile.vm.instructions.embed import Embed
from tpcompile.vm.instructions.head import Argmax, NormLmHead
from tpcompile.vm.instructions.mlp import NormGateUpSwiglu
from tpcompile.vm.instructions.project import AllReduce, LinearResidual, LinearTerms
from tpcompile.vm.instructions.qkv import NormQkvRopeAppend, NormQkvRows

__all__ = [
    "AllReduce",
    "Argmax",
    "AttentionReduce",
    "Embed",
    "LinearResidual",
    "LinearTerms",
    "NormGateUpSwiglu",
    "NormLmHead",
    "NormQkvRopeAppend",
    "NormQkvRows",
    "PartialAttention",
]
