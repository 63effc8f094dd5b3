"""Programs that the verifier accepts give the same bits whatever their threads are held up by.

And a program that it refuses does not: the delays show the race.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from random import Random

import pytest
import torch

from tests.backends.reference.stepping import Case, place
from tests.models import TOLERANCE, relative_error
from tests.vm.mutants.bases import Base, FineCase
from tests.vm.mutants.judge import Judge
from tests.vm.mutants.orders import ORDERS, threshold_lowered, wait_dropped
from tpcompile.backends.native import Native, executor
from tpcompile.backends.native.build import paths
from tpcompile.vm.program import Program, Role
from tpcompile.vm.proof.verify import check_program

STEPS = 3
THREADS = (2, 3, 8)
WAYS = {2: ((1, 2), (2, 1)), 3: ((1, 3), (3, 1)), 8: ((1, 8), (2, 4))}
"""Ranks and workers per rank with so many threads in all."""
POLICIES = ("critical-path", "round-robin", "dynamic")


def _bases(threads: int) -> list[Base]:
    """Programs with so many threads, of models with biases and with norms of heads."""
    cases = []
    for number, (tp, workers) in enumerate(WAYS[threads]):
        for model in ("tiny-qwen2", "tiny-qwen3"):
            for lowering in ("heads", "rows"):
                turn = len(cases) + number
                cases.append(
                    FineCase(
                        model,
                        tp,
                        lengths=((9,), (9, 10))[turn % 2],
                        spans=1 + turn % 3,
                        lowering=lowering,
                        policy=POLICIES[turn % 3],
                        workers=workers,
                    )
                )
    return [Base(case) for case in cases]


def _programs(threads: int, count: int) -> Iterator[tuple[Base, Program]]:
    """Random programs that the verifier accepts: bases, then mutants of their orders."""
    bases, dice = _bases(threads), Random(threads)
    yield from islice(((base, base.program) for base in bases), count)
    kinds = [kind for kind in ORDERS if kind.__name__ != "workers_added"]
    yielded, tries = len(bases), 0
    while yielded < count:
        base, kind = bases[tries % len(bases)], dice.choice(kinds)
        tries += 1
        mutant = kind(base, dice)
        if mutant is not None and not check_program(mutant[1]):
            yielded += 1
            yield base, mutant[1]


def _run(case: Case, program: Program, path: str, delays: int = 0) -> list[torch.Tensor]:
    """Return the tensors that a launch of some steps leaves behind."""
    memory = case.memory()
    memory.program = program
    native = Native(memory, path, delays)
    place(native, case)
    tokens = native.run(STEPS)
    roles = (Role.TOKENS, Role.LENGTHS, Role.POSITIONS, Role.CACHE)
    values = [tokens, native.logits, *(value for role in roles for value in memory.values(role))]
    values = [value.clone() for value in values]
    native.close()
    return values


@lru_cache(maxsize=64)
def _right(case: Case, path: str) -> list[torch.Tensor]:
    return _run(case, case.program, path)


def _same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Bit by bit; slots of the cache that have no token are NaN on both sides."""
    return all(
        torch.equal(value.nan_to_num(nan=-9e9), other.nan_to_num(nan=-9e9))
        for value, other in zip(actual, expected, strict=True)
    )


def _check(threads: int, count: int, path: str) -> None:
    ran = 0
    for seed, (base, program) in enumerate(_programs(threads, count), start=1):
        assert len(program.queues) * program.sharing == threads
        values = _run(base.case, program, path, delays=seed)
        assert _same(values, _right(base.case, path)), (str(base), seed)
        ran += 1
    assert ran == count


@pytest.mark.parametrize("threads", THREADS)
def test_delays_change_no_bit(threads: int) -> None:
    _check(threads, 14, paths()[0])


@pytest.mark.slow
@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("path", paths())
def test_delays_change_no_bit_of_many(threads: int, path: str) -> None:
    _check(threads, 150, path)


def test_delayed_values_are_the_reference_machine_s() -> None:
    case = FineCase("tiny-qwen3", 2, lengths=(9, 10), lowering="rows", workers=4)
    native, machine = Native(case.memory(), delays=7), case.machine()
    for step in range(2):
        for runner in (native, machine):
            place(runner, case, step)
            runner.run(1)
        assert relative_error(native.logits, machine.logits) < TOLERANCE


def _racing(threads: int, count: int) -> Iterator[tuple[Base, Program]]:
    """Programs that lack a wait, or wait for one signal too few, so that they race."""
    bases, dice, judge = _bases(threads), Random(threads), Judge()
    yielded = tries = 0
    while yielded < count:
        base = bases[tries % len(bases)]
        tries += 1
        mutant = dice.choice((wait_dropped, threshold_lowered))(base, dice)
        if mutant is not None and check_program(mutant[1]) and judge.broken(mutant[1]):
            yielded += 1
            yield base, mutant[1]


def test_delays_show_races(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program races in one place only, which not every seed of delays hits."""
    monkeypatch.setattr(executor, "verify_program", lambda program: None)
    path = paths()[0]
    hits = 0
    for base, program in _racing(3, 8):
        right = _right(base.case, path)
        hits += any(not _same(_run(base.case, program, path, seed), right) for seed in range(1, 9))
    assert hits >= 2
