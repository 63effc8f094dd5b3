"""Tests of the torch module after its own prefill: its caches and its reported values."""

from __future__ import annotations

import torch

from tests.compare.program.cases import QWEN3, case_of
from tpcompile.compare.group_rows import compare_sides


def test_the_cache_holds_the_prompt_and_nothing_else() -> None:
    case = case_of(QWEN3, 3)
    texts = case.steps[0].texts
    held = [texts.places(row, 0, length - 1) for row, length in enumerate(texts.lengths)]
    filled = torch.zeros(texts.slots, dtype=torch.bool)
    filled[torch.cat(held)] = True
    for cache in case.caches:
        numbers = ~cache.isnan()
        assert torch.equal(numbers.all((0, 1, 3, 4)), filled)
        assert torch.equal(numbers.any((0, 1, 3, 4)), filled)


def test_every_value_comes_from_every_rank() -> None:
    """All ranks report their values with the node that computed them."""
    case = case_of(QWEN3, 3)
    side = case.steps[0].module
    assert not side.problems
    q = side.source_indices["q_rotated", 0]
    assert [side.sources[n].split()[-1] for n in q[0, ::16].tolist()] == [*"001122"]
    rows = list(compare_sides(case.steps[0].step, [side]))
    assert all(row.ok for row in rows)
