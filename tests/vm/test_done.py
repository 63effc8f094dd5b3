"""What is known to be done takes no more room in a long program than in a short one."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.vm.programs import MANY, layered, programs
from tpcompile.vm.assemble import assemble
from tpcompile.vm.conflict import heads_of
from tpcompile.vm.done import Done
from tpcompile.vm.earlier import Earlier
from tpcompile.vm.execution import run_order
from tpcompile.vm.known import has
from tpcompile.vm.program import Program
from tpcompile.vm.schedule import POLICIES
from tpcompile.vm.verify import check_program


@MANY
@given(programs(most=8))
def test_what_is_known_to_be_done_is_what_cannot_be_overtaken(program: Program) -> None:
    """Against an adversary who holds one instruction back after the other."""
    order = list(run_order(program))
    known = dict(Done(program, order).walk())
    for held in order:
        shared = program.sharing > 1
        tried = list(run_order(program, held, apart=shared))
        before = set(tried[: tried.index(held)])
        for number in order:
            if number != held:
                assert has(known[number], held) == (number not in before)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_size_of_sets_does_not_depend_on_the_number_of_layers(policy: str) -> None:
    sizes = []
    for layers in (6, 12):
        buffers, steps = layered(layers, ranks=2, blocks=4)
        costs = [1.0 + number % 3 for number in range(len(steps))]
        program = assemble("", buffers, steps, costs, policy, 3, 2, repeats=True).program
        assert check_program(program) == []
        walk = Done(program, list(run_order(program))).walk()
        widest = max(bits.bit_length() for _, (_, bits) in walk)
        several = [some for own in Earlier(program, heads_of(steps)).of for some in own]
        sizes.append((widest, max(bits.bit_length() for _, _, bits in several)))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("policy", POLICIES)
def test_counters_grow_with_the_layers(policy: str) -> None:
    found = []
    for layers in (6, 9, 12):
        buffers, steps = layered(layers, ranks=2, blocks=4)
        program = assemble("", buffers, steps, [1.0] * len(steps), policy, 3, 2).program
        found.append(program.counters)
    assert found[2] - found[1] <= found[1] - found[0] + 2
