"""What is done, whatever happens, when an instruction starts: by its queue, and by its waits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from tpcompile.vm.execution import run_order
from tpcompile.vm.known import NOTHING, Known, union, with_one
from tpcompile.vm.program import Program, Wait, queue_by_instruction


class Done:
    """Of a program that ends, with an order in which it can run."""

    def __init__(self, program: Program, order: list[int]) -> None:
        self._program, self._order = program, order
        self._gathered: list[Known] = [NOTHING] * program.counters
        """What is done when all signals of a counter have come."""
        self._front: list[Known] = [NOTHING] * len(program.queues)
        """What is done when the last of each queue is, for as far as it was walked."""
        self._needed = {
            wait: self._indispensable(wait)
            for wait in dict.fromkeys(wait for own in program.waits for wait in own)
            if wait.until < len(program.signallers[wait.counter])
        }
        """Of waits for some signals of a counter: the signallers that they cannot do without."""

    def walk(self) -> Iterator[tuple[int, Known]]:
        """Each instruction with what is done when it starts."""
        program = self._program
        apart = {number for needed in self._needed.values() for number in needed}
        behind: dict[int, Known] = {}
        queue_of = queue_by_instruction(program.queues)
        front = self._front
        for number in self._order:
            known = front[queue_of[number]] if program.sharing == 1 else NOTHING
            for wait in program.waits[number]:
                if wait not in self._needed:
                    known = union(known, self._gathered[wait.counter])
                else:
                    for signaller in self._needed[wait]:
                        known = union(known, behind[signaller])
            yield number, known
            done = front[queue_of[number]] = with_one(known, number)
            for counter in program.signals[number]:
                self._gathered[counter] = union(self._gathered[counter], done)
            if number in apart:
                behind[number] = done

    def unguarded(self) -> Iterator[int]:
        """Once walked, those that can start before all of the step before is done.

        Whatever is the first of a step to start has nothing of its step before it in its queue,
        and waits for no signal of its step: only for those of the step before. If that, and what
        its worker has done before, is all of a step, then it is for those that start later.
        """
        program = self._program
        everything: Known = (len(self._order), 0)
        for queue, front in zip(program.queues, self._front, strict=True):
            for number in queue[:1] if program.sharing == 1 else queue:
                waits = program.waits[number]
                if any(wait.until > 0 for wait in waits):
                    continue
                known = front if program.sharing == 1 else NOTHING
                for wait in waits:
                    if wait.until == 0:
                        known = union(known, self._gathered[wait.counter])
                if known != everything:
                    yield number

    def _indispensable(self, wait: Wait) -> list[int]:
        """The signallers without which the wait cannot be over."""
        if wait.until <= 0:
            return []
        signallers = dict.fromkeys(self._program.signallers[wait.counter])
        return [number for number in signallers if not self._reached(wait, number)]

    def _reached(self, wait: Wait, held: int) -> bool:
        program = self._program
        order = run_order(program, held, apart=program.sharing > 1)
        before = takewhile(held.__ne__, order)
        return sum(program.signals[n].count(wait.counter) for n in before) >= wait.until
