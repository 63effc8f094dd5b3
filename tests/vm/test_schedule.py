"""Every policy gives queues that can be run, and list scheduling waits for inputs to finish."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.vm.programs import Touch, program_of, programs
from tests.vm.test_verify import MANY
from tpcompile.errors import UsageError
from tpcompile.vm.counters import assign_counters
from tpcompile.vm.dependencies import dependencies
from tpcompile.vm.program import Program
from tpcompile.vm.region import Buffer, Region
from tpcompile.vm.schedule import POLICIES, depths, schedule, tails
from tpcompile.vm.timing import timing
from tpcompile.vm.verify import check_program


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_makes_valid_programs(policy: str) -> None:
    @MANY
    @given(programs(), st.integers(1, 5), st.data())
    def check(program: Program, workers: int, data: st.DataObject) -> None:
        groups = dependencies(program.buffers, program.instructions)
        count = len(program.instructions)
        costs = data.draw(st.lists(st.floats(0.5, 4), min_size=count, max_size=count))
        queues = schedule(policy, groups, costs, workers)
        assert len(queues) == workers
        ordering = assign_counters(groups, queues)
        made = Program(
            program.buffers, program.instructions, queues, ordering.waits, ordering.signals
        )
        assert check_program(made) == []
        found = timing(made, costs)
        assert found.makespan >= max(tails(groups, costs)) - 1e-9
        assert found.makespan * workers >= sum(costs) - 1e-9
        assert all(idle >= -1e-9 for idle in found.idle)

    check()


def chain_and_rest() -> tuple[tuple[Buffer, ...], tuple[Touch, ...], list[float]]:
    """A chain of three long ones, and six short ones that nothing hangs on."""
    buffers = (Buffer("chain", (1,)), *(Buffer(f"b{n}", (1,)) for n in range(6)))
    one = ((0, 1),)
    chain = [Touch((Region(0, one),), (Region(0, one),), f"chain {n}") for n in range(3)]
    rest = [Touch(writes=(Region(1 + n, one),), label=f"rest {n}") for n in range(6)]
    return buffers, (*rest, *chain), [1.0] * 6 + [2.0] * 3


def test_the_critical_path_comes_first() -> None:
    buffers, steps, costs = chain_and_rest()
    groups = dependencies(buffers, steps)
    spans = {}
    for policy in POLICIES:
        queues = schedule(policy, groups, costs, 2)
        spans[policy] = timing(program_of(buffers, steps, queues), costs).makespan
    assert spans["critical-path"] == 6.0 == max(tails(groups, costs))
    assert min(spans.values()) == 6.0 < spans["round-robin"]


def test_31_nothing_is_given_out_before_its_inputs_are_there() -> None:
    """The second of a chain must not block a worker that has other work to do meanwhile."""
    buffers, steps, costs = chain_and_rest()
    groups = dependencies(buffers, steps)
    queues = schedule("critical-path", groups, costs, 2)
    assert queues[0] == (6, 7, 8)
    assert sorted(queues[1]) == list(range(6))


def test_depths_and_tails() -> None:
    buffers, steps, costs = chain_and_rest()
    groups = dependencies(buffers, steps)
    assert depths(groups) == [0] * 6 + [0, 1, 2]
    assert tails(groups, costs) == [1.0] * 6 + [6.0, 4.0, 2.0]


@pytest.mark.parametrize(
    ("policy", "workers", "said"),
    [("wave", 0, "0 workers"), ("wavy", 2, "Did you mean wave"), ("wave", -1, "can run nothing")],
)
def test_bad_input(policy: str, workers: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        schedule(policy, [()], [1.0], workers)
