"""`python -m tests.backends.native.damage FIRST COUNT`: damaged programs on the native executor.

Each case is a seed: a small real program with one thing wrong in its words, its lists, its buffers
or the table of buffers. It is decoded and loaded as a program from outside is. It must be refused,
or compute what the reference machine computes. A line is printed before each case and after it, so
that the last line names the case if the process dies.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Any

import torch

from tests.backends.reference.step_models import APART, INT4, INT8
from tests.backends.reference.stepping import place
from tests.models import TOLERANCE
from tests.vm.mutants.bases import MODELS, Base, FineCase
from tpcompile.backends.memory import StepMemory
from tpcompile.backends.native import Native
from tpcompile.backends.reference import Machine
from tpcompile.backends.rotation import Rotation
from tpcompile.errors import CompileError
from tpcompile.ir.format import FLOATS, Format, Kind
from tpcompile.vm.program import Buffer, Program, Role
from tpcompile.vm.program.abi import COLUMNS
from tpcompile.vm.program.encoding import EncodedProgram, Lists, decode_program, encode_program
from tpcompile.vm.program.weight import Weight

REFUSED, SAME, OTHER, RAISED = "refused", "same", "OTHER", "RAISED"
CASES = [
    FineCase(model, tp, lengths, spans, lowering, policy=policy, workers=workers)
    for model in (*MODELS, APART)
    for tp, lengths, spans, lowering, policy, workers in (
        (1, (9, 10), 2, "heads", "critical-path", 2),
        (1, (9,), 1, "rows", "round-robin", 12),
        (2, (9,), 2, "heads", "dynamic", 2),
    )
] + [
    FineCase(INT4, 2, (9, 10), 2, policy="critical-path", workers=2),
    FineCase(INT4, 1, (9,), 1, "rows", policy="round-robin", workers=12),
    FineCase(INT8, 3, (9,), 2, policy="dynamic", workers=2),
]


@dataclass(frozen=True, eq=False)
class Damaged:
    """What a program is loaded from, with one thing wrong."""

    encoded: EncodedProgram
    like: Program
    """The program that gives buffers and options."""
    what: str = ""
    row: tuple[int, int, int] | None = None
    """A row of the table of buffers, a column, and its wrong value."""


Damage = Callable[[Random, Damaged], Damaged]


@lru_cache
def _right(case: FineCase) -> Damaged:
    return Damaged(encode_program(case.program), case.program)


@lru_cache
def _parts(case: FineCase) -> tuple[dict[tuple[int, str], torch.Tensor], Rotation, Any]:
    """Return the weights by rank and name, the rotation, and the prefilled caches."""
    memory = case.memory()
    pairs = zip(memory.program.buffers, memory.tensors, strict=True)
    weights = {
        (buffer.rank, buffer.name + part.suffix): tensor
        for buffer, held in pairs
        if buffer.role == Role.WEIGHT
        for part, tensor in zip(
            buffer.stored.components,
            held.parts.values() if isinstance(held, Weight) else (held,),
            strict=True,
        )
    }
    return weights, case.rotation, memory.values(Role.CACHE)


def _changed(dice: Random, old: int, values: Sequence[int]) -> int:
    """Another number of 32 bits: near the old one, far from it, or one that stands elsewhere."""
    far = old ^ (1 << dice.randrange(31)), dice.randrange(-(2**31), 2**31), 2**31 - 1, -(2**31)
    near = old + 1, old - 1, 2 * old, old // 2, -old, 0, -1, 1
    wrong = [n for n in (*near, *far, dice.choice(values)) if n != old and -(2**31) <= n < 2**31]
    return dice.choice(wrong)


def _with(dice: Random, values: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Change one element."""
    flat = values.reshape(-1).clone()
    index = dice.randrange(len(flat))
    old = int(flat[index])
    flat[index] = _changed(dice, old, flat.tolist())
    return flat.view(values.shape), f"[{index}] {old} -> {int(flat[index])}"


def word(dice: Random, right: Damaged) -> Damaged:
    """Change one word of one instruction. Others of its column are likely values."""
    words = right.encoded.words.clone()
    number, used = dice.randrange(len(words)), int((words != 0).sum(1).max())
    column = dice.randrange(used)
    old = int(words[number, column])
    words[number, column] = _changed(dice, old, words[:, column].tolist())
    description = f"word {column} of instruction {number}: {old} -> {int(words[number, column])}"
    return replace(right, encoded=replace(right.encoded, words=words), what=description)


def row(dice: Random, right: Damaged) -> Damaged:
    """Put one instruction in the place of another, or swap two."""
    words = right.encoded.words.clone()
    number, other = dice.sample(range(len(words)), 2)
    held = words[number].clone()
    words[number] = words[other]
    if dice.random() < 0.5:
        words[other] = held
    description = f"instruction {number} is {other}"
    return replace(right, encoded=replace(right.encoded, words=words), what=description)


def lists(dice: Random, right: Damaged) -> Damaged:
    """Change an offset or a value of queues, waits or signals."""
    name = dice.choice(("queues", "waits", "signals"))
    old: Lists = getattr(right.encoded, name)
    part = dice.choice(("offsets", "values", "values"))
    new, change = _with(dice, getattr(old, part))
    changed = replace(right.encoded, **{name: replace(old, **{part: new})})
    return replace(right, encoded=changed, what=f"{name}.{part}{change}")


def totals(dice: Random, right: Damaged) -> Damaged:
    """Change the number of signals of a counter."""
    new, change = _with(dice, right.encoded.totals)
    return replace(right, encoded=replace(right.encoded, totals=new), what=f"totals{change}")


def buffer(dice: Random, right: Damaged) -> Damaged:
    """Change the dtype, shape, storage, role, rank, format or first column of a buffer."""
    buffers = list(right.like.buffers)
    number = dice.choice(_damageable(buffers))
    old, other = buffers[number], dice.choice(buffers)
    new = dice.choice(_BUFFERS)(dice, old, other)
    buffers[number] = new
    description = f"buffer {number}: {old} -> {new}"
    return replace(right, like=replace(right.like, buffers=tuple(buffers)), what=description)


def _damageable(buffers: Sequence[Buffer]) -> list[int]:
    """Return the numbers of buffers, of which every other one is a weight of few bits, if any."""
    few_bits = [number for number, candidate in enumerate(buffers) if candidate.format is not None]
    return [*range(len(buffers)), *few_bits * (len(buffers) // max(1, len(few_bits)))]


def _format(dice: Random, old: Buffer) -> Buffer:
    """Change the kind, the dtype of scales, the size of groups, or whether there are offsets."""
    if old.format is None:
        return replace(old, format=dice.choice([Format.int8(torch.float32), *FLOATS]))
    bits = dice.choice([1 << 15, *(1 << bit for bit in range(16, 24))])
    kind = Format.grouped(
        dice.choice([Kind.INT4, Kind.INT8]),
        dice.choice([torch.float32, torch.bfloat16]),
        old.format.components[1].columns,
    )
    return replace(old, format=dice.choice([None, Format(old.format ^ bits), kind]))


def _first(dice: Random, old: Buffer) -> Buffer:
    return replace(old, first=old.first + dice.choice([1, 8, 16, 32, 48, -16, -32, 2**31]))


def _shape(dice: Random, old: tuple[int, ...]) -> tuple[int, ...]:
    dim = dice.randrange(len(old))
    extent = dice.choice([old[dim] + 1, old[dim] - 1, 2 * old[dim], old[dim] // 2, 0, -1])
    return dice.choice([(*old[:dim], extent, *old[dim + 1 :]), old[::-1], old[:-1], (*old, 1)])


def _stored(dice: Random, old: Buffer, other: Buffer) -> Buffer:
    return replace(old, storage=_shape(dice, dice.choice([old.extents, other.extents])))


_BUFFERS: tuple[Callable[[Random, Buffer, Buffer], Buffer], ...] = (
    lambda dice, old, other: replace(old, dtype=dice.choice([torch.bfloat16, torch.float16])),
    lambda dice, old, other: replace(old, dtype=other.dtype),
    lambda dice, old, other: replace(old, shape=_shape(dice, old.shape)),
    lambda dice, old, other: replace(old, shape=other.shape),
    lambda dice, old, other: replace(old, role=dice.choice(list(Role))),
    lambda dice, old, other: replace(old, rank=dice.choice([old.rank + 1, old.rank - 1])),
    lambda dice, old, other: other,
    lambda dice, old, other: _format(dice, old),
    lambda dice, old, other: _first(dice, old),
    _stored,
)


def options(dice: Random, right: Damaged) -> Damaged:
    """Change the number of ranks, or of workers per queue, or whether steps repeat."""
    like = right.like
    new: dict[str, Any] = dice.choice(
        [
            {"ranks": dice.choice([0, -1, like.ranks + 1, like.ranks + 2])},
            {"sharing": dice.choice([0, -1, like.sharing + 1, like.sharing + 2])},
            {"repeats": not like.repeats},
        ]
    )
    return replace(right, like=replace(like, **new), what=str(new))


def table_row(dice: Random, right: Damaged) -> Damaged:
    """Change a word of the table of buffers; its columns are in `abi.COLUMNS`."""
    number = dice.choice(_damageable(right.like.buffers))
    column = dice.randrange(sum(COLUMNS.values()))
    value = dice.choice([-1, 0, 1, 2, 3, 4, 64, 2**40, 2**62, -(2**62), dice.randrange(5000)])
    description = f"column {column} of buffer {number} is {value}"
    return replace(right, row=(number, column, value), what=description)


KINDS: tuple[Damage, ...] = (
    word,
    word,
    word,
    row,
    lists,
    lists,
    buffer,
    table_row,
    options,
    totals,
)


def case_of(seed: int) -> tuple[FineCase, Damaged]:
    """Return the case of a seed; cases and kinds take turns."""
    case, kind = CASES[seed % len(CASES)], KINDS[seed // len(CASES) % len(KINDS)]
    damaged = kind(Random(seed), _right(case))
    return case, replace(damaged, what=f"{kind.__name__} {damaged.what} ({Base(case)})")


def verdict(case: FineCase, damaged: Damaged) -> str:
    """Load and run a damaged program."""
    try:
        program = decode_program(damaged.encoded, damaged.like)
        memory = _memory(case, program)
        if damaged.row is not None:
            _damage_table(memory, *damaged.row)
        native = Native(memory)
        place(native, case)
        native.run(1)
    except CompileError:
        return REFUSED
    values = _left(native)
    native.run(3 if program.repeats else 1)  # which must not crash
    native.close()
    machine = Machine(_memory(case, program))
    place(machine, case)
    machine.run(1)
    return SAME if all(map(_alike, values, _left(machine))) else OTHER


def _memory(case: FineCase, program: Program) -> StepMemory:
    weights, rotation, caches = _parts(case)
    nothing = torch.empty(0)
    return StepMemory(
        program,
        lambda rank, name: weights.get((rank, name), nothing),
        rotation,
        [cache.clone() for cache in caches],
    )


def _damage_table(memory: StepMemory, number: int, column: int, value: int) -> None:
    right = memory.table()
    right[number, column] = value
    memory.table = lambda: right  # type: ignore[method-assign]


def _left(executor: Native | Machine) -> list[torch.Tensor]:
    """Return the tensors that a step leaves behind."""
    roles = (Role.HISTORY, Role.TOKENS, Role.LENGTHS, Role.POSITIONS, Role.FINISHED, Role.CACHE)
    values = [value for role in roles for value in executor.memory.values(role)]
    return [executor.logits.clone(), *(value.clone() for value in values)]


def _alike(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether integers are equal, and floats within the tolerance; NaN equals NaN."""
    if not actual.is_floating_point():
        return torch.equal(actual, expected)
    strange = ~torch.isfinite(expected)
    if not torch.equal(actual[strange].nan_to_num(), expected[strange].nan_to_num()):
        return False
    if bool((torch.isnan(actual) != torch.isnan(expected)).any()):
        return False
    error, most = (actual - expected)[~strange].abs(), expected[~strange].abs()
    return not len(most) or bool(error.max() <= TOLERANCE * most.max())


def main(first: int, count: int) -> int:
    """Print the verdict of each case, and their numbers; 0 if all are as they must be."""
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    for seed in range(first, first + count):
        case, damaged = case_of(seed)
        _say(f"case {seed}: {damaged.what}")
        try:
            outcome = verdict(case, damaged)
        except Exception as error:
            outcome = f"{RAISED} {type(error).__name__}: {error}"
        counts[outcome.partition(" ")[0]] += 1
        _say(f": {outcome}\n")
    _say(f"{dict(counts)}\n")
    return int(counts[OTHER] + counts[RAISED] > 0)


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
