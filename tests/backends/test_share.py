"""Tests of the memory that ranks share when each rank runs in its own process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.backends.reference.stepping import Case
from tpcompile.backends.share import RankShare, SharedLayout
from tpcompile.errors import RankError

CASE = Case("tiny-qwen3", tp=2, lengths=(9, 3))


def test_only_what_several_ranks_touch_is_shared() -> None:
    program = CASE.program
    shared = {program.buffers[number].name for number in SharedLayout.of(program).buffers}
    assert shared == {"attention_terms", "mlp_terms", "best_logits", "best_ids"}
    assert not SharedLayout.of(replace(CASE, tp=1).program).buffers


def test_places_are_apart() -> None:
    program, layout = CASE.program, SharedLayout.of(CASE.program)
    share = RankShare(program, 0, bytearray(layout.size))
    ends = [
        (start, start + share.tensors[number].nbytes) for number, start in layout.buffers.items()
    ]
    ends += [(layout.counters + layout.row * rank, 0) for rank in range(program.ranks)]
    ends.append((layout.board, layout.board + share.board.nbytes))
    assert all(span[1] <= other[0] for span, other in pairwise(ends))
    assert layout.row >= 8 * program.counters
    assert layout.board == layout.counters + layout.row * program.ranks
    assert layout.size == layout.board + share.board.nbytes


def test_a_rank_that_never_signals_is_missed() -> None:
    program = CASE.program
    share = RankShare(program, 0, bytearray(SharedLayout.of(program).size), timeout=0.05)
    with pytest.raises(RankError, match=r"Rank 0 waited 0.05 s .*At all_reduce .*at least 1"):
        list(share.order(program))


def test_a_rank_that_has_ended_is_missed_at_once() -> None:
    """What it signalled before counts."""
    program = CASE.program
    memory = bytearray(SharedLayout.of(program).size)
    share = RankShare(program, 0, memory, lost=lambda: True)
    with pytest.raises(RankError, match=r"Another rank has ended. At all_reduce"):
        list(share.order(program))
    memory = bytearray(SharedLayout.of(program).size)
    signalled = RankShare(program, 1, memory).counters
    for counter, signallers in enumerate(program.signallers):
        ranks = [program.instructions[number].rank for number in signallers]
        signalled[1, counter] = ranks.count(1)
    share = RankShare(program, 0, memory, lost=lambda: True)
    assert len(list(share.order(program))) == sum(
        instruction.rank == 0 for instruction in program.instructions
    )


def test_each_rank_runs_its_own_instructions() -> None:
    """Each rank runs its instructions in order, and counters reach their final values."""
    program = CASE.program
    memory = bytearray(SharedLayout.of(program).size)

    def run(rank: int) -> list[int]:
        return list(RankShare(program, rank, memory).order(program))

    with ThreadPoolExecutor() as threads:
        ran = list(threads.map(run, range(2)))
    ranks = [instruction.rank for instruction in program.instructions]
    assert ran == [[n for n, owner in enumerate(ranks) if owner == rank] for rank in range(2)]
    share = RankShare(program, 0, memory)
    totals = [len(signallers) for signallers in program.signallers]
    assert [share.count(counter) for counter in range(program.counters)] == totals
