"""What is done, whatever happens, when an instruction starts: by its queue, and by its waits."""

from __future__ import annotations

from collections.abc import Iterator

from tpcompile.vm.program import Program, Wait, queue_by_instruction
from tpcompile.vm.proof.known import NOTHING, Known, in_at_least, union, with_one


class Done:
    """Of a program that ends, with an order in which it can run.

    An instruction is known to be done if nothing that waits for it can start while it is held
    back. Workers that share a queue may be any number, so such a queue orders nothing.
    """

    def __init__(self, program: Program, order: list[int]) -> None:
        self._program, self._order = program, order
        self._gathered: list[Known] = []
        """What is done when all signals of a counter have come."""
        self._front: list[Known] = []
        """What is done when the last of each queue is, for as far as it was walked."""
        self._partial = {
            wait
            for own in program.waits
            for wait in own
            if wait.until < len(program.signallers[wait.counter])
        }
        """Waits for some signals of a counter, no matter which."""
        self._behind: dict[int, Known] = {
            number: (len(order), 0)
            for wait in self._partial
            for number in program.signallers[wait.counter]
        }
        """By signaller of a partial wait, what is done when it is; at first, everything."""

    def walk(self) -> Iterator[tuple[int, Known]]:
        """Each instruction with what is done when it starts."""
        self._settle()
        return self._round()

    def _settle(self) -> None:
        """Compute what is done after each signaller of a partial wait.

        Which of the signals come first is open, and a signaller may stand behind the wait in the
        order. So every round takes away what the last one could not confirm, until all is.
        """
        before: dict[int, Known] = {}
        while before != self._behind:
            before = dict(self._behind)
            for _ in self._round():
                pass

    def _round(self) -> Iterator[tuple[int, Known]]:
        program = self._program
        queue_of = queue_by_instruction(program.queues)
        self._gathered = [NOTHING] * program.counters
        front = self._front = [NOTHING] * len(program.queues)
        met: dict[Wait, Known] = {}
        for number in self._order:
            known = front[queue_of[number]] if program.sharing == 1 else NOTHING
            for wait in program.waits[number]:
                if wait not in self._partial:
                    known = union(known, self._gathered[wait.counter])
                    continue
                if wait not in met:
                    met[wait] = self._once_met(wait)
                known = union(known, met[wait])
            yield number, known
            done = front[queue_of[number]] = with_one(known, number)
            for counter in program.signals[number]:
                self._gathered[counter] = union(self._gathered[counter], done)
            if number in self._behind:
                self._behind[number] = done

    def _once_met(self, wait: Wait) -> Known:
        """What so many signallers need that too few are left while it is held back."""
        signallers = self._program.signallers[wait.counter]
        spare = len(signallers) - wait.until
        if spare >= len(signallers):
            return NOTHING
        return in_at_least([self._behind[number] for number in signallers], spare + 1)

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
