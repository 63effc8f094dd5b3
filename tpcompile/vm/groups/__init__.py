"""The instructions of a decode step: operands, regions, execution and lowering by group."""

from tpcompile.vm.groups.attention import AttentionReduce, PartialAttention
from tpcompile.vm.groups.delta import DeltaStep
from tpcompile.vm.groups.embed import Embed
from tpcompile.vm.groups.experts import ExpertTerms, NormExperts, SharedTerms
from tpcompile.vm.groups.head import Argmax, NormLmHead
from tpcompile.vm.groups.mlp import NormGate, NormGatedUp, NormGateUpSwiglu, NormUpActivation
from tpcompile.vm.groups.project import LinearResidual, LinearTerms
from tpcompile.vm.groups.qkv import NormQkvRopeAppend, NormQkvRows
from tpcompile.vm.groups.reduce import AllReduce
from tpcompile.vm.groups.router import TopExperts
from tpcompile.vm.groups.rows import NormRows

__all__ = [
    "AllReduce",
    "Argmax",
    "AttentionReduce",
    "DeltaStep",
    "Embed",
    "ExpertTerms",
    "LinearResidual",
    "LinearTerms",
    "NormExperts",
    "NormGate",
    "NormGateUpSwiglu",
    "NormGatedUp",
    "NormLmHead",
    "NormQkvRopeAppend",
    "NormQkvRows",
    "NormRows",
    "NormUpActivation",
    "PartialAttention",
    "SharedTerms",
    "TopExperts",
]
