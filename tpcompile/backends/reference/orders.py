"""Legal asynchronous execution orders of a program's instructions."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from tpcompile.errors import VerifyError
from tpcompile.vm.program import Program

Order = Callable[[Program], Iterator[int]]
"""A function from a program to its instruction numbers in execution order."""


def in_program_order(program: Program) -> Iterator[int]:
    """Return the sequential order, which defines the result. Ignore queues and counters."""
    return iter(range(len(program.instructions)))


def shuffled(seed: int) -> Order:
    """Return an order that picks any ready worker at random at each step."""
    dice = random.Random(seed)
    return lambda program: _play(program, lambda ready: dice.choice(ready))


def held_back(number: int, seed: int = 0) -> Order:
    """Return an adversarial order: this instruction runs only if no other one can."""
    dice = random.Random(seed)

    def choose(ready: list[int]) -> int:
        alternatives = [candidate for candidate in ready if candidate != number]
        return dice.choice(alternatives or ready)

    return lambda program: _play(program, choose)


def _play(program: Program, choose: Callable[[list[int]], int]) -> Iterator[int]:
    """Yield the instructions in the order in which `choose` picks them from the ready ones.

    A worker takes the first instruction of its queue. The workers of a shared queue take one each.
    """
    missing = _Missing(program)
    left = [list(reversed(queue)) for queue in program.queues]
    hands: list[list[int]] = [[] for _ in left]
    while True:
        for queue, hand in zip(left, hands, strict=True):
            while queue and len(hand) < program.sharing:
                hand.append(queue.pop())
        ready = [number for hand in hands for number in hand if not missing.waits[number]]
        if not ready:
            break
        number = choose(ready)
        next(hand for hand in hands if number in hand).remove(number)
        for counter in program.signals[number]:
            missing.signal(counter)
        yield number
    stuck = [number for hand in hands for number in hand]
    if stuck:
        names = "; ".join(program.instructions[number].label for number in stuck[:3])
        raise VerifyError("The program deadlocks", got=f"{len(stuck)} waiting workers: {names}")


class _Missing:
    """The number of unmet waits of each instruction."""

    def __init__(self, program: Program) -> None:
        self._counts = [0] * program.counters
        self._waiting: list[dict[int, list[int]]] = [{} for _ in self._counts]
        """For each counter, the instructions that wait for each of its values."""
        self.waits = [0] * len(program.instructions)
        for number, waits in enumerate(program.waits):
            for wait in waits:
                if wait.until > 0:
                    self.waits[number] += 1
                    self._waiting[wait.counter].setdefault(wait.until, []).append(number)

    def signal(self, counter: int) -> None:
        self._counts[counter] += 1
        for number in self._waiting[counter].get(self._counts[counter], ()):
            self.waits[number] -= 1
