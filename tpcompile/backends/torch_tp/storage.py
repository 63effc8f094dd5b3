"""The storage order of a rank's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import torch
from torch import fx

from tpcompile.ir.format import Format
from tpcompile.ir.meta import parameters, value_type
from tpcompile.ir.ops import LINEAR


class Storage(StrEnum):
    """The order of a parameter's elements in memory."""

    ROWS = "rows"
    """Row by row, as in a checkpoint. Programs read only this."""
    MATRIX = "matrix"
    """The order that matrix kernels prefer: see `as_matrix`. On some machines it is row by row."""
    BOTH = "rows and matrix"
    """Both: a linear and another op read the parameter, as with a tied head."""


Storages = Mapping[str, Storage]
"""The storage of each parameter, by name."""


def storages_of(graph: fx.Graph, *, programs: bool = False) -> dict[str, Storage]:
    """Return the storage of each parameter; with `programs`, modules share them with programs."""
    return {str(node.target): _storage(node, programs) for node in parameters(graph)}


def _storage(parameter: fx.Node, programs: bool) -> Storage:
    if programs or value_type(parameter).stored != Format.of(torch.bfloat16):
        return Storage.ROWS
    of_linear = [_is_weight_of(parameter, user) for user in parameter.users]
    if all(of_linear):
        return Storage.MATRIX
    return Storage.BOTH if any(of_linear) else Storage.ROWS


def _is_weight_of(parameter: fx.Node, user: fx.Node) -> bool:
    return user.target is LINEAR and user.args[1] is parameter and parameter not in user.args[2:]
