"""Ranks with a module of a few lines, for tests of starting and running ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from tpcompile.backends.torch_tp import Storage
from tpcompile.ir.recipe import Tensor, take
from tpcompile.runtime.ranks.rank import LocalParameter, RankModule
from tpcompile.runtime.ranks.step import Step

WEIGHT = Tensor("model.weight", (6, 4))
ACTS = """
        if int(x[0]) == RANK:
            if int(x[1]) == 0:
                raise ValueError("this rank fails")
            if int(x[1]) == 1:
                os.kill(os.getpid(), 9)
            if int(x[1]) == 2:
                time.sleep(1000)
            if int(x[1]) == 3:
                print("something odd", file=sys.stderr)
                os._exit(7)
            if int(x[1]) == 4:
                os.kill(os.getpid(), 7)
        return self.group.all_reduce(x)"""
"""Rank `x[0]` performs the special action `x[1]`."""

_SOURCE = """
import os, sys, time
import torch

class Rank{rank}(torch.nn.Module):
    def __init__(self, parameters, rotary, group):
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, torch.nn.Parameter(value, False))
        self.rotary = rotary
        self.group = group

    def forward(self, {arguments}):
        {body}
"""


class Doubled(nn.Module):
    """Rotary module whose tables encode positions, width and dtype."""

    def forward(
        self, positions: torch.Tensor, width: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        table = positions[:, None].expand(-1, width).to(dtype)
        return table, table * 2


def modules(
    tp: int,
    body: str = "return self.group.all_reduce(x)",
    *,
    arguments: str = "x",
    parameters: Sequence[Mapping[str, LocalParameter]] | None = None,
    rotary: tuple[tuple[int, torch.dtype], ...] = (),
) -> list[RankModule]:
    """Return one module per rank, all with the same body, in which `RANK` is the rank."""
    return [
        RankModule(
            rank=rank,
            source=_SOURCE.format(
                rank=rank, arguments=arguments, body=body.replace("RANK", str(rank))
            ),
            parameters=parameters[rank] if parameters else {},
            outputs=("logits",),
            cache=None,
            rotary=rotary,
        )
        for rank in range(tp)
    ]


def halves() -> list[dict[str, LocalParameter]]:
    """Return the two ranks' rows of the weight."""
    return [
        {
            "weight": LocalParameter(
                take(WEIGHT, 0, 3 * rank, 3 * rank + 3), torch.float32, Storage.ROWS
            )
        }
        for rank in range(2)
    ]


def step(**inputs: torch.Tensor) -> Step:
    return Step(inputs=inputs, output="logits")
