"""All policies give runnable queues, and list scheduling waits for inputs to complete."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vm.programs import MANY, Touch, steps
from tpcompile.errors import UsageError
from tpcompile.vm.program import Buffer, Region
from tpcompile.vm.proof.dependencies import dependencies
from tpcompile.vm.proof.verify import check_program
from tpcompile.vm.schedule.assemble import assemble
from tpcompile.vm.schedule.clock import timing
from tpcompile.vm.schedule.list_schedule import tails
from tpcompile.vm.schedule.policies import POLICIES, depths, policy_for, schedule
from tpcompile.vm.targets import TARGETS


def test_default_policies_of_targets() -> None:
    assert POLICIES[policy_for(TARGETS["cpu"])].dynamic, "its workers share the blocks of a phase"
    assert not POLICIES[policy_for(TARGETS["h200"])].dynamic
    assert policy_for(TARGETS["cpu"], "Zigzag") == "zigzag"
    with pytest.raises(UsageError, match="zigzag"):
        policy_for(TARGETS["cpu"], "zigzg")


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_makes_valid_programs(policy: str) -> None:
    @settings(MANY, max_examples=150)
    @given(steps(ranks=3), st.integers(1, 5), st.booleans(), st.data())
    def check(drawn: Any, workers: int, repeats: bool, data: st.DataObject) -> None:
        buffers, instructions = drawn
        count = len(instructions)
        costs = data.draw(st.lists(st.floats(0, 4), min_size=count, max_size=count))
        assembled = assemble("", buffers, instructions, costs, policy, workers, 3, repeats)
        assert check_program(assembled.program) == []
        times = timing(assembled.program, costs)
        assert times.makespan >= max(tails(assembled.groups, costs)) - 1e-9
        assert times.makespan * workers * 3 >= sum(costs) - 1e-9
        assert len(times.idle) == workers * 3 and min(times.idle) >= -1e-9

    check()


def chain_and_rest() -> tuple[tuple[Buffer, ...], tuple[Touch, ...], list[float]]:
    """Return a chain of three long instructions, and six independent short ones."""
    buffers = (Buffer("chain", (1,)), *(Buffer(f"b{n}", (1,)) for n in range(6)))
    box = ((0, 1),)
    chain = [Touch((Region(0, box),), (Region(0, box),), f"chain {n}") for n in range(3)]
    short = [Touch(writes=(Region(1 + n, box),), label=f"rest {n}") for n in range(6)]
    return buffers, (*short, *chain), [1.0] * 6 + [2.0] * 3


def test_the_critical_path_comes_first() -> None:
    buffers, chain, costs = chain_and_rest()
    groups = dependencies(chain)
    spans = {}
    for policy in POLICIES:
        program = assemble("", buffers, chain, costs, policy, 2).program
        spans[policy] = timing(program, costs).makespan
    assert spans["dynamic"] == spans["critical-path"] == 6.0 == max(tails(groups, costs))
    assert min(spans.values()) == 6.0 < spans["round-robin"]


def test_31_nothing_is_given_out_before_its_inputs_are_there() -> None:
    """The second instruction of a chain does not block a worker that has other work."""
    _, chain, costs = chain_and_rest()
    groups = dependencies(chain)
    queues = schedule("critical-path", groups, costs, 2)
    assert queues[0] == (6, 7, 8)
    assert sorted(queues[1]) == list(range(6))


def test_each_rank_works_for_itself() -> None:
    """Workers run instructions of their own rank, ordered by the time of all ranks."""
    groups = dependencies([Touch()] * 6)
    ranks_of, costs = [0, 1, 0, 1, 0, 1], [3.0, 1.0, 2.0, 1.0, 1.0, 1.0]
    queues = {p: schedule(p, groups, costs, 2, ranks_of, 2) for p in POLICIES}
    assert queues["round-robin"] == ((0, 4), (2,), (1, 5), (3,))
    assert queues["zigzag"] == ((0,), (2, 4), (1,), (3, 5))
    assert queues["wave"] == queues["critical-path"] == ((0,), (2, 4), (1, 5), (3,))
    assert queues["dynamic"] == ((0, 2, 4), (1, 3, 5))


def test_depths_and_tails() -> None:
    _, chain, costs = chain_and_rest()
    groups = dependencies(chain)
    assert depths(groups) == [0] * 6 + [0, 1, 2]
    assert tails(groups, costs) == [1.0] * 6 + [6.0, 4.0, 2.0]


@pytest.mark.parametrize(
    ("policy", "workers", "message"),
    [
        ("wave", 0, "workers must be at least 1, got 0"),
        ("wavy", 2, "Unknown policy 'wavy'. Did you mean wave"),
        ("wave", -1, "workers must be at least 1, got -1"),
    ],
)
def test_bad_input(policy: str, workers: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        schedule(policy, [()], [1.0], workers)
