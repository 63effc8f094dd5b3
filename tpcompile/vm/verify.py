"""Proves that a program means what its instructions mean one after the other, whoever is first.

Every instruction is in one queue, nothing waits for ever, and every two that conflict are
ordered: by their queue, or by counters. Sets of instructions are integers, a bit for each, so a
program of tens of thousands is checked in about a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tpcompile.errors import VerifyError
from tpcompile.vm.execution import run_all
from tpcompile.vm.program import Program, Wait, conflict, worker_by_instruction
from tpcompile.vm.region import Box, Region, box_text, overlap, refusal


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a program, in words."""

    rule: str
    said: str


def verify_program(program: Program) -> None:
    """Raise if anything is wrong."""
    faults = check_program(program)
    if faults:
        more = f" ({len(faults)} faults in all)" if len(faults) > 1 else ""
        raise VerifyError(f"The program is not valid: {faults[0].rule}{more}", got=faults[0].said)


def check_program(program: Program) -> list[Fault]:
    """Everything that is wrong; what rests on a broken part is not looked at."""
    return (
        list(_check_queues(program))
        or list(_check_regions(program))
        or list(_check_counters(program))
        or list(_check_order(program))
    )


def _check_queues(program: Program) -> Iterator[Fault]:
    count = len(program.instructions)
    if not len(program.waits) == len(program.signals) == count:
        yield Fault("shape", f"{count} instructions, not so many waits and signals")
        return
    seen = [0] * count
    for worker, queue in enumerate(program.queues):
        for number in queue:
            if not 0 <= number < count:
                yield Fault("queue", f"worker {worker} runs {number}, which is no instruction")
            else:
                seen[number] += 1
    for number, times in enumerate(seen):
        if times != 1:
            yield Fault("queue", f"{_name(program, number)} is in the queues {times} times")


def _check_regions(program: Program) -> Iterator[Fault]:
    for number, instruction in enumerate(program.instructions):
        for region in (*instruction.reads, *instruction.writes):
            if not 0 <= region.buffer < len(program.buffers):
                yield Fault("bounds", f"{_name(program, number)} touches buffer {region.buffer}")
                continue
            buffer = program.buffers[region.buffer]
            wrong = refusal(region.box, buffer.shape)
            if wrong:
                yield Fault("bounds", f"{_name(program, number)} touches {buffer.name}, {wrong}")


def _check_counters(program: Program) -> Iterator[Fault]:
    raised = [0] * program.counters
    for own in program.signals:
        for counter in own:
            raised[counter] += 1
    for number, waits in enumerate(program.waits):
        for wait in waits:
            if wait.until > raised[wait.counter]:
                yield Fault(
                    "threshold",
                    f"{_name(program, number)} waits for {wait.until} signals of counter "
                    f"{wait.counter}, which gets {raised[wait.counter]}",
                )
    left = run_all(program)
    if left:
        waits_for = ", ".join(f"counter {w.counter} ≥ {w.until}" for w in program.waits[left[0]])
        yield Fault(
            "deadlock",
            f"{len(left)} instructions never run; {_name(program, left[0])} waits for {waits_for}",
        )


def _check_order(program: Program) -> Iterator[Fault]:
    """Every earlier conflicting instruction is among those known to be done."""
    conflicts = _Conflicts(program)
    for number, known in _known_before(program):
        missing = conflicts.before[number] & ~known
        if missing:
            early = missing.bit_length() - 1
            yield Fault("order", _unordered(program, early, number))


def _unordered(program: Program, early: int, late: int) -> str:
    found = conflict(program, early, late)
    assert found is not None
    first, second = found
    did = "writes" if first in program.instructions[early].writes else "reads"
    does = "writes" if second in program.instructions[late].writes else "reads"
    buffer = program.buffers[first.buffer].name
    return (
        f"{_name(program, early)} {did} {buffer}{box_text(first.box)} and "
        f"{_name(program, late)} {does} {buffer}{box_text(second.box)}; the second can come first, "
        "for no queue and no counter makes it wait"
    )


def _known_before(program: Program) -> Iterator[tuple[int, int]]:
    """Each instruction with the set of those that are done, whatever happens, when it starts."""
    order: list[int] = []
    run_all(program, order.append)
    signallers: list[list[int]] = [[] for _ in range(program.counters)]
    for number, own in enumerate(program.signals):
        for counter in own:
            signallers[counter].append(number)
    early = {
        w.counter for own in program.waits for w in own if w.until < len(signallers[w.counter])
    }
    worker_of = worker_by_instruction(program.queues)
    front = [0] * len(program.queues)
    gathered = [0] * program.counters
    """What is done when all signals of a counter have come."""
    apart: dict[int, int] = {}
    """What is done behind each signaller of a counter that some do not wait for to the end."""
    for number in order:
        known = front[worker_of[number]]
        for wait in program.waits[number]:
            if wait.until >= len(signallers[wait.counter]):
                known |= gathered[wait.counter]
            else:
                for signaller in _needed(program, wait, signallers[wait.counter]):
                    known |= apart[signaller]
        yield number, known
        done = front[worker_of[number]] = known | 1 << number
        for counter in program.signals[number]:
            gathered[counter] |= done
            if counter in early:
                apart[number] = done


def _needed(program: Program, wait: Wait, signallers: list[int]) -> list[int]:
    """The signallers without which the wait cannot be over."""
    return [s for s in signallers if not _reached(program, wait, without=s)]


def _reached(program: Program, wait: Wait, without: int) -> bool:
    count = 0

    def visit(number: int) -> None:
        nonlocal count
        count += program.signals[number].count(wait.counter)

    run_all(program, visit, without)
    return count >= wait.until


@dataclass
class _Touched:
    """Who has read and written each part of one buffer so far."""

    readers: dict[Box, int] = field(default_factory=dict)
    writers: dict[Box, int] = field(default_factory=dict)
    near: dict[Box, list[Box]] = field(default_factory=dict)
    """For each part the parts that overlap it."""

    def union(self, sets: dict[Box, int], box: Box) -> int:
        found = 0
        for other in self.near[box]:
            found |= sets.get(other, 0)
        return found


class _Conflicts:
    """For every instruction the set of earlier ones that it conflicts with."""

    def __init__(self, program: Program) -> None:
        self._touched = [_Touched() for _ in program.buffers]
        for buffer, boxes in enumerate(_boxes(program)):
            near = self._touched[buffer].near
            for box in boxes:
                near[box] = [other for other in boxes if overlap(box, other)]
        self._written: dict[Region, int] = {}
        """Who wrote what overlaps a region, for as long as nothing more is written there."""
        self.before = [self._visit(program, n) for n in range(len(program.instructions))]

    def _visit(self, program: Program, number: int) -> int:
        instruction = program.instructions[number]
        found = 0
        for region in instruction.reads:
            found |= self._writers(region)
        for region in instruction.writes:
            touched = self._touched[region.buffer]
            found |= self._writers(region) | touched.union(touched.readers, region.box)
        for region in instruction.reads:
            readers = self._touched[region.buffer].readers
            readers[region.box] = readers.get(region.box, 0) | 1 << number
        for region in instruction.writes:
            touched = self._touched[region.buffer]
            touched.writers[region.box] = touched.writers.get(region.box, 0) | 1 << number
            for box in touched.near[region.box]:
                self._written.pop(Region(region.buffer, box), None)
        return found

    def _writers(self, region: Region) -> int:
        if region not in self._written:
            touched = self._touched[region.buffer]
            self._written[region] = touched.union(touched.writers, region.box)
        return self._written[region]


def _boxes(program: Program) -> list[list[Box]]:
    """The distinct parts of each buffer that are touched."""
    found: list[dict[Box, None]] = [{} for _ in program.buffers]
    for instruction in program.instructions:
        for region in (*instruction.reads, *instruction.writes):
            found[region.buffer][region.box] = None
    return [list(boxes) for boxes in found]


def _name(program: Program, number: int) -> str:
    return f"{program.instructions[number].label} (instruction {number})"
