"""Bitwise comparison of the results of all ranks; a step normally returns rank 0's alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tpcompile.ir.ops.experts import Routed
from tpcompile.runtime.ranks.protocols import Ranks, RanksOf
from tpcompile.runtime.ranks.routing import RouterShape, bytes_of, unpacked
from tpcompile.runtime.ranks.step import Routing, Step


class WatchedRanks(RanksOf):
    """Ranks whose results are compared bit by bit in every step."""

    def __init__(self, ranks: Ranks, routers: Sequence[RouterShape] = ()) -> None:
        super().__init__(ranks)
        self._routers = routers
        self.steps = 0
        self.results: list[torch.Tensor] = []
        """The result of every rank, from the first step in which they differ, or from the last."""
        self.agree_so_far = True
        self.experts: tuple[torch.Tensor, ...] = ()
        """The experts that routers choose in further steps, by router; empty to leave them."""
        self.choices: list[Routed] = []
        """The choices of the routers in the last step, if others were given."""

    def run(self, step: Step) -> torch.Tensor:
        if self.experts:
            step = replace(step, routing=Routing(self.experts))
        results = self._ranks.run_all(step)
        self.steps += 1
        agree = self.agree_so_far and all(same_bits(results[0], other) for other in results[1:])
        if self.experts:
            dtype = self._routers[0].dtype
            routed = [unpacked(result, step, dtype, self._routers) for result in results]
            results, self.choices = [result for result, _ in routed], routed[0][1]
        if self.agree_so_far:
            self.results, self.agree_so_far = results, agree
        return results[0]

    def run_all(self, step: Step) -> list[torch.Tensor]:
        return self._ranks.run_all(step)


def same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether the bits are equal, also of signed zeros and NaN."""
    alike = tensor.shape == other.shape and tensor.dtype == other.dtype
    return alike and torch.equal(bytes_of(tensor), bytes_of(other))
