"""Tests of assembling instructions into a proved program, on several ranks and across steps."""

from __future__ import annotations

import pytest

from tests.vm.programs import Touch
from tpcompile.errors import UsageError
from tpcompile.vm.program import Buffer, Region, Role, Wait
from tpcompile.vm.proof.verify import check_program
from tpcompile.vm.schedule.assemble import assemble
from tpcompile.vm.schedule.policies import POLICIES


def two_ranks() -> tuple[tuple[Buffer, ...], tuple[Touch, ...]]:
    """Return per rank an embed, two halves of a term, a sum of both ranks' terms, and a token."""
    roles = {"token": Role.TOKENS, "x": Role.SCRATCH, "terms": Role.SCRATCH}
    buffers = tuple(
        Buffer(name, (4,), rank=rank, role=role) for name, role in roles.items() for rank in (0, 1)
    )
    whole = [Region(number, ((0, 4),)) for number in range(6)]
    steps = [Touch((whole[r],), (whole[2 + r],), f"embed {r}", r) for r in range(2)]
    for half in ((0, 2), (2, 4)):
        steps += [
            Touch((whole[2 + r],), (Region(4 + r, (half,)),), f"terms {r} {half}", r)
            for r in range(2)
        ]
    steps += [Touch((whole[4], whole[5]), (whole[r],), f"sum {r}", r) for r in range(2)]
    return buffers, tuple(steps)


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_of_two_ranks(policy: str) -> None:
    buffers, steps = two_ranks()
    assembled = assemble(
        "step", buffers, steps, [1.0] * 8, policy, workers=2, ranks=2, repeats=True
    )
    program = assembled.program
    assert check_program(program) == []
    assert (program.name, program.ranks, program.repeats) == ("step", 2, True)
    shared = policy == "dynamic"
    assert (program.sharing, len(program.queues)) == ((2, 2) if shared else (1, 4))
    assert set(assembled.seconds) == {"dependencies", "schedule", "counters"}
    first = [n for n, waits in enumerate(program.waits) if any(wait.until == 0 for wait in waits)]
    assert first == [0, 1], "embeds wait for the tokens of the previous step"
    (ends,) = {wait.counter for n in first for wait in program.waits[n] if wait.until == 0}
    assert [n for n, counters in enumerate(program.signals) if ends in counters] == [6, 7]


def test_without_repeating_nobody_waits_for_a_step_before() -> None:
    buffers, steps = two_ranks()
    program = assemble("step", buffers, steps, [1.0] * 8, workers=2, ranks=2).program
    assert all(wait.until for waits in program.waits for wait in waits)
    assert Wait(0, 0) not in program.waits[0]


def test_an_instruction_of_no_rank_is_refused() -> None:
    buffers, steps = two_ranks()
    with pytest.raises(UsageError, match=r"embed 1 belongs to rank 1, .*a rank from 0 to 0"):
        assemble("step", buffers, steps, [1.0] * 8)
