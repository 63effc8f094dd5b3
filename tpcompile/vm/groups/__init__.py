"""The instructions of a decode step, a file for each group: operands, regions, meaning, lowering."""

from tpcompile.vm.groups.attention import AttentionReduce, PartialAttention
from tpcompile.vm.groups.embed import Embed
from tpcompile.vm.groups.head import Argmax, NormLmHead
from tpcompile.vm.groups.mlp import NormGateUpSwiglu
from tpcompile.vm.groups.project import AllReduce, LinearResidual, LinearTerms
from tpcompile.vm.groups.qkv import NormQkvRopeAppend, NormQkvRows

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
