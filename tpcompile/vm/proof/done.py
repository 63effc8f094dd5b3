"""The instructions known to be complete, in every legal execution, when an instruction starts.

They follow from the order of its queue and from its waits.
"""

from __future__ import annotations

from collections.abc import Iterator

from tpcompile.vm.program import Program, Wait, queue_by_instruction
from tpcompile.vm.proof.known import NOTHING, Known, in_at_least, union, with_one


class Done:
    """The instructions known to be complete, for a terminating program and an order it can run in.

    Instruction A is known to be complete when B starts if B cannot start while A is held back. A
    shared queue may have any number of workers, so it orders nothing.
    """

    def __init__(self, program: Program, order: list[int]) -> None:
        self._program, self._order = program, order
        self._gathered: list[Known] = []
        """By counter, the instructions known to be complete when all its signals have arrived."""
        self._front: list[Known] = []
        """By queue, the instructions known to be complete after the last one walked so far."""
        self._partial = {
            wait
            for waits in program.waits
            for wait in waits
            if 0 < wait.until < len(program.signallers[wait.counter])
        }
        """Waits for only some signals of a counter in this step, no matter which."""
        self._behind: dict[int, Known] = {
            number: (len(order), 0)
            for wait in self._partial
            for number in program.signallers[wait.counter]
        }
        """By signaller of a partial wait, the instructions known to be complete after it. At first
        these are all instructions."""

    def walk(self) -> Iterator[tuple[int, Known]]:
        """Iterate over the instructions, each with those known to be complete when it starts."""
        self._settle()
        return self._round()

    def _settle(self) -> None:
        """Compute the instructions known to be complete after each signaller of a partial wait.

        The signals may arrive in any order, and a signaller may come after the wait in the run
        order. So each set starts with all instructions, and each round drops those that the
        previous round could not confirm, until nothing changes.
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
                if wait.until <= 0:  # for the previous step, so it implies nothing about this one
                    continue
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
        """Return the instructions without which too few signallers can run to meet the wait."""
        signallers = self._program.signallers[wait.counter]
        spare = len(signallers) - wait.until
        return in_at_least([self._behind[number] for number in signallers], spare + 1)

    def unguarded(self) -> Iterator[int]:
        """Yield the instructions that can start before the previous step is complete.

        Call this after `walk` is exhausted.

        The first instruction of a step to start has no instruction of its step before it in its
        queue, and waits for no signal of its step, only for signals of the previous one. If these
        signals and the earlier work of its worker imply that the whole previous step is complete,
        then it is complete for every instruction that starts later.
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
