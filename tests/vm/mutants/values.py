"""`python -m tests.vm.mutants.values [COUNT [SEED]]`: edits that keep operand rules and order.

An edit changes operands of one instruction, or of all that make a value together: another buffer of
the same kind, another number, another tile; or it leaves an instruction out, or runs one twice. The
program is scheduled again, so that no proof of its form or order refuses it. The reference machine
says whether numbers change, with random weights, in two steps.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from random import Random
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tests.backends.reference.stepping import tables_of, texts
from tests.vm.mutants.bases import Base
from tests.vm.mutants.table import all_bases
from tests.vm.mutants.words import Word, words_of_kind
from tpcompile.backends.memory import StepMemory
from tpcompile.backends.reference import Machine, in_program_order
from tpcompile.vm.program import Program, Role
from tpcompile.vm.program.instruction import NONE, Range
from tpcompile.vm.program.operands import disagreements
from tpcompile.vm.program.weight import Weight
from tpcompile.vm.proof.computes import check_values
from tpcompile.vm.proof.verify import check_program
from tpcompile.vm.schedule.assemble import assemble

_STEPS = 2
_TOLERANCE = 1e-5
"""The largest difference, relative to the largest value, by which rounding may change a result."""


@dataclass(frozen=True, eq=False)
class Edit:
    """A program with one edit, scheduled again."""

    base: Base
    what: str
    operand: str
    program: Program

    def __str__(self) -> str:
        return f"{self.what} ({self.base})"


def edits(base: Base, dice: Random) -> Iterator[Edit]:
    """Yield random edits of a program that no other proof refuses, without end."""
    runs = _runs(base)
    while True:
        start, stop = dice.choice(runs)
        edited = _edited(base, dice, start, stop)
        if edited is not None:
            description, operand, instructions = edited
            if any(True for _ in disagreements(replace(base.program, instructions=instructions))):
                continue
            program = _scheduled(base, instructions)
            if instructions != base.program.instructions and not check_program(program):
                yield Edit(base, description, operand, program)


@lru_cache(maxsize=64)
def _runs(base: Base) -> list[tuple[int, int]]:
    """Return the instructions with the same shared operands, as intervals."""
    runs, start = [], 0
    for _, group in groupby(base.steps, key=lambda step: id(step.at)):
        count = len(list(group))
        runs.append((start, start + count))
        start += count
    return runs


def _edited(base: Base, dice: Random, start: int, stop: int) -> Any:
    """Return a description, the operand, and the instructions with an edit; None if it fails."""
    steps: list[Any] = list(base.steps)
    number = dice.randrange(start, stop)
    step = steps[number]
    how = dice.choice(["operand"] * 16 + ["dropped", "twice", "exchanged", "later"])
    if how == "dropped":
        return f"{step.label} dropped", how, (*steps[:number], *steps[number + 1 :])
    if how == "twice":
        other = dice.randrange(start, stop)
        steps[other] = step
        return f"{step.label} instead of {base.steps[other].label}", how, tuple(steps)
    if how == "exchanged":
        other = dice.randrange(start, stop)
        steps[number], steps[other] = steps[other], step
        return f"{step.label} and {steps[number].label} exchanged", how, tuple(steps)
    if how == "later":
        return f"{step.label} repeated", how, (*steps[:stop], step, *steps[stop:])
    kind: Any = type(step)
    word = dice.choice(words_of_kind(kind))
    whole = not word.own and dice.random() < 0.6
    value = _other(base, dice, step, word)
    if value is None:
        return None
    path = word.path.removesuffix(".start").removesuffix(".stop")
    places = range(start, stop) if whole else (number,)
    operands = None
    for place in places:
        if word.own:
            steps[place] = replace(steps[place], **{path: value})
        else:
            operands = operands or _with(step.at, path, value)
            steps[place] = replace(steps[place], at=operands)
    scope = "all of " if whole else ""
    return f"{scope}{step.label}: {path} is {value}", f"{step.name}.{path}", tuple(steps)


def _with(operands: Any, path: str, value: Any) -> Any:
    outer, _, inner = path.rpartition(".")
    if outer:
        return replace(operands, **{outer: replace(getattr(operands, outer), **{inner: value})})
    return replace(operands, **{inner: value})


def _value(step: Any, word: Word) -> Any:
    value = step if word.own else step.at
    for name in word.path.split("."):
        value = getattr(value, name)
    return value


def _other(base: Base, dice: Random, step: Any, word: Word) -> Any:
    """Return another value of an operand, or None."""
    if word.kind is Range:
        path = word.path.rpartition(".")[0]
        span = getattr(step, path)
        offset = dice.choice([-4, -1, 1, 4, span.extent, -span.extent])
        other: Any = getattr(dice.choice([i for i in base.steps if type(i) is type(step)]), path)
        return dice.choice(
            [Range(span[0] + offset, span[1] + offset), Range(span[0], span[1] + offset), other]
        )
    old = _value(step, word)
    if word.kind is bool:
        return not old
    if word.kind is float:
        return dice.choice([2 * old, old / 2, old + 0.125, 10 * old, 0.0])
    if word.kind is not int:
        alike = [getattr(i.at, word.path, old) for i in base.steps if not word.own]
        return dice.choice([*alike, *(list(word.kind) if hasattr(word.kind, "__iter__") else [])])
    buffers = base.program.buffers
    if 0 <= old < len(buffers) and dice.random() < 0.7:
        look = _look(buffers[old])
        alike = [n for n, buffer in enumerate(buffers) if _look(buffer) == look and n != old]
        return dice.choice([*alike, *alike, NONE])
    return dice.choice([old + 1, old - 1, 0, 2 * old, NONE, old // 2])


def _look(buffer: Any) -> object:
    return buffer.role, buffer.shape, buffer.dtype, buffer.rank, buffer.format


def _scheduled(base: Base, instructions: Sequence[Any]) -> Program:
    program, case = base.program, base.case
    return assemble(
        program.name,
        program.buffers,
        instructions,
        [1.0] * len(instructions),
        case.policy,
        case.workers,
        program.ranks,
        program.repeats,
    ).program


@lru_cache(maxsize=4)
def _memory(base: Base) -> StepMemory:
    """Return a memory whose weights are all random."""
    memory = base.case.memory()
    for number, buffer in enumerate(base.program.buffers):
        if buffer.role == Role.WEIGHT:
            weight = memory.tensors[number]
            generator = torch.Generator().manual_seed(number - buffer.rank)
            if isinstance(weight, Weight):
                continue
            noise = torch.randn(weight.shape, generator=generator).to(weight.dtype)
            scale = 0.3 if len(buffer.shape) == 1 else weight.float().std().to(weight.dtype)
            memory.tensors[number] = weight + noise * scale
    return memory


def results(base: Base, program: Program) -> list[torch.Tensor]:
    """Return the logits, the state, and the caches that two steps of a program leave."""
    memory = _memory(base)
    written = [n for n, buffer in enumerate(program.buffers) if buffer.role != Role.WEIGHT]
    saved = [memory.tensors[number].clone() for number in written]
    memory.program = program
    try:
        machine = Machine(memory)
        case = base.case
        rows = texts(case.model, case.lengths)
        tokens = [row[n - 1] for row, n in zip(rows, case.lengths, strict=True)]
        machine.place(torch.stack(tokens), torch.tensor(case.lengths), tables_of(case.lengths))
        logits = []
        for _ in range(_STEPS):
            machine.run(1, in_program_order)
            logits.append(machine.logits.clone())
        kinds = ("state", "cache")
        names = [n for n, buffer in enumerate(program.buffers) if buffer.role.kind in kinds]
        return [*logits, *(memory.tensors[n].clone() for n in names)]
    finally:
        memory.program = base.program
        for number, tensor in zip(written, saved, strict=True):
            memory.tensors[number].copy_(tensor)


@lru_cache(maxsize=64)
def _right(base: Base) -> list[torch.Tensor]:
    return results(base, base.program)


def changes_numbers(edit: Edit) -> bool:
    """Return whether an edit changes results by more than rounding does."""
    try:
        actual = results(edit.base, edit.program)
    except (RuntimeError, IndexError, ValueError, ZeroDivisionError):
        return True
    return not all(map(_near, actual, _right(edit.base)))


def _near(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    missing = actual.isnan()
    if not torch.equal(missing, expected.isnan()):
        return False
    actual, expected = actual[~missing].double(), expected[~missing].double()
    same = actual == expected  # infinities too
    actual, expected = actual[~same], expected[~same]
    if not actual.numel():
        return True
    return bool((actual - expected).abs().max() <= _TOLERANCE * (1 + expected.abs().max()))


def main(arguments: Sequence[str]) -> int:
    """Print the results by operand; return 1 if an edit that changes numbers is accepted."""
    count, seed = [*map(int, arguments), *(500, 0)[len(arguments) :]]
    torch.set_num_threads(1)
    dice, bases = Random(seed), all_bases()
    counts: Counter[tuple[str, bool, bool]] = Counter()
    strange: list[str] = []
    for turn in range(0, count, _EACH):
        base = bases[(seed + turn // _EACH) % len(bases)]
        for edit, _ in zip(edits(base, dice), range(min(_EACH, count - turn)), strict=False):
            computed, changed = check_values(base.case.graph, edit.program), changes_numbers(edit)
            counts[edit.operand, changed, computed.proved] += 1
            if changed and computed.proved:
                strange.append(f"ACCEPTED: {edit}")
            elif not changed and not computed.proved:
                strange.append(f"Refused: {edit}: {computed.faults[0].message}")
    Console(width=130, highlight=False).print(_table(counts), "\n".join(strange), markup=False)
    return int(any(changed and proved for _, changed, proved in counts))


_EACH = 75
"""The edits of a program before the next program."""


def _table(counts: Counter[tuple[str, bool, bool]]) -> Table:
    table = Table(title="Edits that keep operand rules and order")
    table.add_column("operand", no_wrap=True)
    for heading in (
        "edits",
        "numbers change",
        "of these accepted",
        "no change",
        "of these refused",
    ):
        table.add_column(heading, justify="right")
    operands = sorted({operand for operand, *_ in counts})
    for operand in (*operands, "all"):
        tally = Counter[tuple[bool, bool]]()
        for (other, *result), number in counts.items():
            if operand in (other, "all"):
                tally[result[0], result[1]] += number
        changed, same = (
            tally[True, True] + tally[True, False],
            tally[False, True] + tally[False, False],
        )
        row = changed + same, changed, tally[True, True], same, tally[False, False]
        table.add_row(operand, *map(str, row))
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
