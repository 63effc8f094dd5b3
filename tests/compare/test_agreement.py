"""A rank that differs in a single bit is detected, and its values are kept."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.ranks.tiny_ranks import Doubled, modules, step
from tpcompile.compare.agreement import WatchedRanks, same_bits
from tpcompile.runtime.ranks.in_process import InProcessRanks
from tpcompile.runtime.ranks.rank import RankModule

CPU = torch.device("cpu")


def _watched(rank_modules: list[RankModule]) -> WatchedRanks:
    return WatchedRanks(
        InProcessRanks(rank_modules, lambda name, index: torch.ones(1), Doubled, CPU)
    )


def test_ranks_that_agree() -> None:
    ranks = _watched(modules(3))
    for _ in range(2):
        assert ranks.run(step(x=torch.tensor([1.0]))).tolist() == [3.0]
    assert (ranks.steps, ranks.agree_so_far) == (2, True)
    assert [result.tolist() for result in ranks.results] == [[3.0]] * 3


def test_a_rank_that_differs_once() -> None:
    """Rank 2 differs in the last bit of its second step; later steps do not hide it."""
    ranks = _watched(modules(3, "return x + x * 2**-23 * (x == 2) * (RANK == 2)"))
    for value in (1.0, 2.0, 3.0):
        assert ranks.run(step(x=torch.tensor([value]))).item() == value
    assert (ranks.steps, ranks.agree_so_far) == (3, False)
    assert [result.item() for result in ranks.results] == [2.0, 2.0, 2.0 + 2**-22]


@pytest.mark.parametrize(
    ("tensor", "other", "same"),
    [
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([1]), torch.tensor([1.0]), False),
        (torch.ones(2), torch.ones(2, 1), False),
    ],
    ids=["nan", "signs of zero", "dtypes", "shapes"],
)
def test_bits(tensor: torch.Tensor, other: torch.Tensor, same: bool) -> None:
    assert same_bits(tensor, other) == same


def test_it_is_the_ranks_in_all_else() -> None:
    ranks = _watched(modules(2))
    assert len(ranks.processes) == 2
    ranks.agree()
    ranks.close()
    assert ranks.closed == "The model is closed"
