"""List scheduling prefers urgent instructions that are ready, on one clock for all ranks."""

from __future__ import annotations

import pytest

from tests.vm.programs import Touch
from tpcompile.vm.program import Region
from tpcompile.vm.proof.dependencies import dependencies
from tpcompile.vm.schedule.list_schedule import Start, list_schedule, tails

ROW = [Region(number, ((0, 1),)) for number in range(3)]


def test_a_rank_waits_for_another() -> None:
    """While rank 1 waits for rank 0, it runs its other instructions."""
    steps = [Touch(writes=(ROW[0],)), Touch(reads=(ROW[0],), rank=1), Touch(rank=1), Touch(rank=1)]
    starts = list_schedule(dependencies(steps), [2.0, 5.0, 1.0, 4.0], [0, 1, 1, 1], 1, 2)
    assert starts == [Start(0, 0), Start(1, 3), Start(1, 1), Start(1, 2)]
    idle = list_schedule(dependencies(steps[:2]), [2.0, 5.0], [0, 1], 1, 2)
    assert idle == [Start(0, 0), Start(1, 1)]


@pytest.mark.parametrize("cost", [0.0, 1.0])
def test_what_takes_no_time_is_started_too(cost: float) -> None:
    steps = [Touch(writes=(ROW[0],)), Touch((ROW[0],), (ROW[1],)), Touch(reads=(ROW[1],))]
    for workers in (1, 3):
        starts = list_schedule(dependencies(steps * 2), [cost] * 6, [0] * 6, workers, 1)
        assert [start.number for start in starts] == list(range(6))


def test_the_tail_of_a_group_is_that_of_its_longest_user() -> None:
    steps = [Touch(writes=(ROW[0],)), Touch(reads=(ROW[0],)), Touch((ROW[0],), (ROW[1],))]
    steps.append(Touch(reads=(ROW[1],)))
    assert tails(dependencies(steps), [1.0, 10.0, 2.0, 3.0]) == [11.0, 10.0, 5.0, 3.0]
