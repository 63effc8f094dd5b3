"""A faster oracle for programs of a few hundred instructions.

Conflicts come from a table, which all mutants of a program share. Only instructions of the first
step are held back: if no instruction of the second step can run before the first step is
complete, later steps behave like the first; otherwise more steps are examined. Runs without the
held instruction continue from the point where some order reaches it, since counters only rise.
Arrivals in a head are counted in program order: if no conflicting instruction is overtaken, all
other orders give the same counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement
from typing import ClassVar

from tpcompile.vm.program import Box, Instruction, Program, Wait, overlap
from tpcompile.vm.proof.conflict import heads_of
from tpcompile.vm.proof.execution import run_order, unrolled
from tpcompile.vm.proof.oracle import STEPS, misplaced, split, undefined

Instructions = Sequence[Instruction]
_Use = tuple[Box, bool, int | None]
"""Part of a buffer, whether it is written, and the head if it is a block's."""


_MOST_KNOWN = 64
"""More than there are programs that mutants are derived from."""


class Judge:
    """Oracle that caches the conflicts of programs."""

    _known: ClassVar[dict[int, tuple[Instructions, list[int]]]] = {}

    def broken(self, program: Program) -> bool:
        """Return whether any legal order goes wrong."""
        if misplaced(program):
            return True
        steps = unrolled(program, 2) if program.repeats else program
        return (
            len(list(run_order(steps))) < len(steps.instructions)
            or any(True for _ in self.overtaken(program))
            or _splits_a_head(steps)
            or any(True for _ in undefined(program))
        )

    def overtaken(self, program: Program) -> Iterator[tuple[int, int]]:
        """Yield instructions with a later conflicting one that can run first.

        Instructions are numbered across steps. The program must not deadlock.
        """
        conflicts, mixed = self.conflicts(program.instructions), False
        steps = unrolled(program, 2) if program.repeats else program
        for held, done in _overtaking(steps, len(program.instructions)):
            mixed = mixed or bool(done >> len(program.instructions))
            yield from _pair(held, done & conflicts[held])
        if mixed:
            steps = unrolled(program, STEPS)
            conflicts = _conflicts(steps.instructions)
            for held, done in _overtaking(steps, len(steps.instructions)):
                yield from _pair(held, done & conflicts[held])

    def conflicts(self, instructions: Instructions) -> list[int]:
        """Return for each instruction the later ones that conflict with it, as bits."""
        held, conflicts = self._known.get(id(instructions), (None, []))
        if held is not instructions:
            conflicts = _conflicts(instructions)
            self._known[id(instructions)] = instructions, conflicts
            if len(self._known) > _MOST_KNOWN:
                del self._known[next(iter(self._known))]
        return conflicts


def _overtaking(steps: Program, count: int) -> Iterator[tuple[int, int]]:
    """Yield each of the first `count` instructions with all that can run before it, as bits."""
    run = _Run(steps)
    for held in run_order(steps):
        if held < count:
            yield held, run.done_without(held)
        run.do(held)


def _pair(held: int, wrong: int) -> Iterator[tuple[int, int]]:
    if wrong:
        yield held, (wrong & -wrong).bit_length() - 1


def _splits_a_head(steps: Program) -> bool:
    """Return whether some head lacks a row or has one twice."""
    if not any(instruction.joins for instruction in steps.instructions):
        return False
    return split(steps.instructions, iter(range(len(steps.instructions)))) is not None


class _Run:
    """State of a partially executed program, from which alternatives are explored."""

    def __init__(self, program: Program) -> None:
        apart = program.sharing > 1
        self._queues = [(n,) for q in program.queues for n in q] if apart else program.queues
        self._waits, self._signals = program.waits, program.signals
        self._queue_of = {n: place for place, queue in enumerate(self._queues) for n in queue}
        self._users: dict[tuple[int, int], list[int]] = {}
        """The queues whose workers wait for this."""
        for number, waits in enumerate(program.waits):
            for wait in waits:
                self._users.setdefault(wait, []).append(self._queue_of[number])
        self._counts = [0] * program.counters
        self._place = [0] * len(self._queues)
        self._done = 0
        self._awake = set(range(len(self._queues)))
        """Queues whose first instruction may be ready."""

    def do(self, number: int) -> None:
        """Run an instruction, which must be ready."""
        self._done |= 1 << number
        queue = self._queue_of[number]
        self._place[queue] += 1
        self._awake.add(queue)
        for counter in self._signals[number]:
            self._counts[counter] += 1
            self._awake.update(self._users.get((counter, self._counts[counter]), ()))
        self._awake = {queue for queue in self._awake if self._ready(queue)}

    def done_without(self, held: int) -> int:
        """Return all instructions that have run or can run before this one, as bits."""
        counts, place, done = self._counts.copy(), self._place.copy(), self._done
        waits, signals, users = self._waits, self._signals, self._users
        awake = list(self._awake)
        while awake:
            index = awake.pop()
            queue, turn = self._queues[index], place[index]
            while turn < len(queue):
                number = queue[turn]
                if number == held or not _met(waits[number], counts):
                    break
                turn += 1
                done |= 1 << number
                for counter in signals[number]:
                    counts[counter] += 1
                    awake += users.get((counter, counts[counter]), ())
            place[index] = turn
        return done

    def _ready(self, queue: int) -> bool:
        numbers, turn = self._queues[queue], self._place[queue]
        return turn < len(numbers) and _met(self._waits[numbers[turn]], self._counts)


def _met(waits: Sequence[Wait], counts: Sequence[int]) -> bool:
    for counter, until in waits:  # noqa: SIM110  # a generator takes twice as long
        if counts[counter] < until:
            return False
    return True


def _conflicts(instructions: Instructions) -> list[int]:
    conflicts = [0] * len(instructions)
    for uses in _uses(instructions).values():
        for (use, numbers), (other, other_numbers) in combinations_with_replacement(
            uses.items(), 2
        ):
            if not _mind(use, other):
                continue
            bits, more = _bits(numbers), _bits(other_numbers)
            for number in numbers:
                conflicts[number] |= more
            for number in other_numbers:
                conflicts[number] |= bits
    return [bits >> number + 1 << number + 1 for number, bits in enumerate(conflicts)]


def _mind(use: _Use, other: _Use) -> bool:
    (box, changes, head), (part, changes_too, same) = use, other
    blocks = head is not None and head == same
    return (changes or changes_too) and not blocks and overlap(box, part)


def _bits(numbers: Sequence[int]) -> int:
    bits = 0
    for number in numbers:
        bits |= 1 << number
    return bits


def _uses(instructions: Instructions) -> dict[int, dict[_Use, list[int]]]:
    """Return the accesses of each buffer."""
    uses: dict[int, dict[_Use, list[int]]] = {}
    heads = heads_of(instructions)

    def use(number: int, buffer: int, access: _Use) -> None:
        uses.setdefault(buffer, {}).setdefault(access, []).append(number)

    for number, instruction in enumerate(instructions):
        for region in instruction.reads:
            use(number, region.buffer, (region.box, False, None))
        for region in instruction.writes:
            use(number, region.buffer, (region.box, True, None))
        for join, head in zip(instruction.joins, heads.by_instruction[number], strict=True):
            use(number, join.region.buffer, (join.region.box, True, head))
    return uses
