"""The residual's two buffers, and the buffers of terms that are summed before they are added.

An addition reads one residual buffer and writes the other, so that an instruction that still norms
the old values does not read new ones.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import fx

from tpcompile.ir.meta import value_type
from tpcompile.ir.ops import ATTENTION_REDUCE, DELTA_STEPS, GATED_ATTENTION_REDUCE
from tpcompile.vm.lowering.building import Building, width_of


class Site(IntEnum):
    """The source of a term of the residual: the embedding, or one half of a layer."""

    EMBEDDING = 0
    ATTENTION = 1
    MLP = 2
    EXPERTS = 3
    """An MLP that is a mixture of experts. The terms of a shared expert are in a second slot. The
    sum takes the terms of all ranks in one slot, then those in the next."""

    @property
    def group(self) -> str:
        """The name of the sum in comparisons of values."""
        return _GROUPS[self]


_GROUPS = {
    Site.EMBEDDING: "embedding",
    Site.ATTENTION: "attention_residual",
    Site.MLP: "mlp_residual",
    Site.EXPERTS: "mlp_residual",
}
_MIXERS = (ATTENTION_REDUCE, GATED_ATTENTION_REDUCE, *DELTA_STEPS)


def site_of(x: fx.Node) -> Site:
    """Return the half of a layer that ends with a projection of `x`. Look through views."""
    while x.op == "call_function" and len(x.all_input_nodes) == 1:
        (x,) = x.all_input_nodes
    return Site.ATTENTION if x.target in _MIXERS else Site.MLP


_TERMS_NAME = {
    Site.ATTENTION: "attention_terms",
    Site.MLP: "mlp_terms",
    Site.EXPERTS: "expert_terms",
}
TERMS_SITE = {name: site for site, name in _TERMS_NAME.items()}


def terms_buffer(builder: Building, site: Site, node: fx.Node, slots: int) -> int:
    """Declare the buffer of the terms of a sum, with some slots per rank.

    The two halves of a layer have separate buffers, so that no rank waits until another rank has
    read the last terms. The embedding comes before attention, so its terms use the MLP's buffer.
    """
    name = _TERMS_NAME.get(site, _TERMS_NAME[Site.MLP])
    return builder.alike(name, (slots * builder.plan.batch, width_of(node)), torch.float32)


def residual_buffer(builder: Building, node: fx.Node, old: fx.Node | None) -> int:
    """Declare the residual buffer that does not hold the old values."""
    name = "x0"
    if old is not None and builder.buffers[builder.buffer(old, 0)].name == "x0":
        name = "x1"
    return builder.alike(name, (builder.plan.batch, width_of(node)), value_type(node).dtype)
