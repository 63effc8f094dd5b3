"""Encoded programs with one wrong word: an operand, a range or a buffer number.

The verifier judges the decoded program, and the machine determines the truth: the instruction runs
on the memory of a real step, with random values in everything that it does not declare as read.
Not all mutants are wrong: another scale is another valid program.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import lru_cache
from random import Random
from typing import Any

import torch

from tests.vm.mutants.bases import Base
from tests.vm.mutants.judge import Judge
from tests.vm.mutants.table import Count, all_bases
from tests.vm.mutants.truth import truth_of
from tpcompile.errors import CompileError, UsageError
from tpcompile.vm.groups.residual import Site
from tpcompile.vm.program import Program, Role
from tpcompile.vm.program.encoding import EncodedProgram, decode_program, encode_program
from tpcompile.vm.program.fields import field_types
from tpcompile.vm.program.instruction import NONE, Range, StepInstruction
from tpcompile.vm.program.text import format_program, parse_program
from tpcompile.vm.proof.verify import check_program

BIASED = (0, 33, 34, 35, 36, 37, 38, 44)
"""Bases with biases: one in queries, keys and values only, and the others in MLPs too."""
FEW_BITS = (39, 40, 41, 42, 43)
"""Bases with weights of few bits."""
LINEAR = 44
"""A base with linear attention."""
EXPERTS = (46, 47)
"""Bases with experts, in one of which ranks hold whole ones, and in the other one is shared."""
FEW = (0, 4, 12, 13, 35, 36, 37, 38, LINEAR, *EXPERTS)
MANY = (*range(8), *range(11, 19), *BIASED[1:], *FEW_BITS)
"""A few small bases with all kinds of instructions, and more of them."""

_SIZES = (
    *("batch", "width", "rows", "ffn", "dtype", "format"),
    *("longest", "most_blocks", "block", "spans", "sequence_rows"),
)
FIXED = frozenset((*_SIZES, "rank", "ranks", "slots", "most_stops", "steps", "first_row"))
"""Operands that a buffer or the program determines, so that any other value contradicts it."""


@dataclass(frozen=True)
class Word:
    """A word of an instruction, by the path of its operand."""

    path: str
    kind: Any
    own: bool
    """Whether the word belongs to the instruction itself, not to shared operands."""

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


@lru_cache
def words_of_kind(kind: Any) -> tuple[Word, ...]:
    """Return all words of an instruction in order, without the opcode."""
    return tuple(_words(kind, "", True))


def _words(kind: Any, prefix: str, own: bool) -> Iterator[Word]:
    for name, inner in field_types(kind):
        if is_dataclass(inner):
            yield from _words(inner, "" if name == "at" else f"{prefix}{name}.", False)
        elif inner is Range:
            yield Word(f"{prefix}{name}.start", inner, own)
            yield Word(f"{prefix}{name}.stop", inner, own)
        else:
            yield Word(prefix + name, inner, own)


@dataclass(frozen=True, eq=False)
class WordMutant:
    """An encoded program with one wrong word, or with two swapped."""

    base: Base
    number: int
    changed: tuple[Word, ...]
    row: list[int]
    what: str

    @property
    def encoded(self) -> EncodedProgram:
        right = _encoded(self.base)
        words = right.words.clone()
        words[self.number] = torch.tensor(self.row, dtype=torch.int32)
        return replace(right, words=words)

    def __str__(self) -> str:
        return f"instruction {self.number}, {self.what} ({self.base})"


@lru_cache(maxsize=64)
def _encoded(base: Base) -> EncodedProgram:
    return encode_program(base.program)


def word_mutants(
    kind: type[StepInstruction],
    count: int,
    seed: int = 0,
    bases: Sequence[int] = FEW,
    operand: str = "",
) -> Iterator[WordMutant]:
    """Yield distinct mutants of this kind of instruction, for all words in turn or one operand."""
    dice = Random(f"{kind.name} {seed}")
    places = [
        (base, [n for n, step in enumerate(base.steps) if type(step) is kind])
        for base in (all_bases()[place] for place in bases)
    ]
    places = [(base, numbers) for base, numbers in places if numbers]
    words = words_of_kind(kind)
    wanted = [n for n, word in enumerate(words) if operand in ("", word.path)]
    keys: set[object] = set()
    for attempt in range(40 * count):
        if len(keys) == count:
            return
        base, numbers = places[(attempt // len(wanted)) % len(places)]
        number, place = dice.choice(numbers), wanted[attempt % len(wanted)]
        row = [int(word) for word in _encoded(base).words[number]]
        changed = _change(dice, words, row, place)
        key = base, number, tuple(row)
        if changed and key not in keys and row != _encoded(base).words[number].tolist():
            keys.add(key)
            label = base.steps[number].label
            changes = ", ".join(f"{words[n].path} is {row[1 + n]}" for n in changed)
            yield WordMutant(
                base, number, tuple(words[n] for n in changed), row, f"{label}: {changes}"
            )


def _change(dice: Random, words: Sequence[Word], row: list[int], place: int) -> list[int]:
    """Change a word of the row in place; return the positions that changed."""
    old, alike = row[1 + place], [n for n, w in enumerate(words) if w.kind is words[place].kind]
    other = dice.choice(alike)
    how = dice.choice(["up", "down", "half", "double", "zero", "other", "swap", "none"])
    if how == "swap":
        row[1 + place], row[1 + other] = row[1 + other], old
        return [place, other]
    new = {
        "up": old + 1,
        "down": old - 1,
        "half": old // 2,
        "double": 2 * old,
        "zero": 0,
        "other": row[1 + other],
        "none": NONE,
    }[how]
    row[1 + place] = max(-(2**31), min(2**31 - 1, new))
    return [place]


@dataclass(frozen=True)
class Verdict:
    """The results for a mutant."""

    refused: bool
    unsafe: bool
    """Whether it races, accesses undeclared regions, or contradicts its buffers."""


def judge_word(mutant: WordMutant, seed: int, orders: bool = True) -> Verdict:
    """Ask decoder, parser and verifier, then oracle and machine, optionally in other orders."""
    base = mutant.base
    try:
        program = decode_program(mutant.encoded, base.program, check=False)
    except UsageError:
        return Verdict(refused=True, unsafe=True)  # no such value
    refused = _refused_at_entry(mutant, program)
    faults = check_program(program)
    assert not refused or faults, f"an entry refuses what the verifier accepts: {mutant}"
    refused = bool(faults)
    if _disagrees(mutant, program):
        return Verdict(refused, unsafe=True)
    return Verdict(refused, unsafe=not _safe(mutant, program, seed, orders))


def _safe(mutant: WordMutant, program: Program, seed: int, orders: bool) -> bool:
    try:
        truth = truth_of(mutant.base)
        told = truth.told_by(program.instructions[mutant.number])
        if not told or Judge().broken(program):
            return False
    except ZeroDivisionError:
        return False  # its regions cannot be computed
    return not orders or truth.comes_right(program, mutant.number, seed)


def _refused_at_entry(mutant: WordMutant, program: Program) -> bool:
    """Return whether words are refused; assert that the text is refused with them."""
    try:
        decode_program(mutant.encoded, mutant.base.program)
        words = False
    except CompileError:
        words = True
    try:
        parse_program(format_program(program))
        text = False
    except CompileError:
        text = True
    assert words is text, f"words {words}, text {text}: {mutant}"
    return words


def _disagrees(mutant: WordMutant, program: Program) -> bool:
    """Return whether a changed word contradicts a buffer, or refers to an unsuitable one."""
    right = mutant.base.steps[mutant.number]
    wrong = program.instructions[mutant.number]
    buffers = program.buffers
    for word in mutant.changed:
        old, new = _value(right, word), _value(wrong, word)
        if old == new or word.kind is Range:
            continue
        if word.kind is float:
            if not math.isfinite(new) or (word.name.endswith("eps") and new < 0):
                return True
        elif word.kind is int and word.name not in _NUMBERS:
            left_out = word.name == "bias" and new == NONE
            if _look(buffers, old) != _look(buffers, new) and not left_out:
                return True
        elif (word.name in FIXED and not word.own) or _out_of_range(wrong, word, new, buffers):
            return True
    return False


def _out_of_range(wrong: Any, word: Word, new: int, buffers: Any) -> bool:
    """Return whether no instruction on these buffers can have this number."""
    if word.name == "layer" and hasattr(wrong.at, "tables"):
        cache = next(buffer for buffer in buffers if buffer.role == Role.CACHE)
        return not 0 <= new < cache.shape[0]
    if word.name in ("first", "experts") and hasattr(wrong.at, "experts"):
        held = getattr(wrong.at, "held", None)  # without it, the logits determine the number
        return held is None or not 0 <= wrong.at.first <= wrong.at.experts - held
    if word.name == "site":  # the embedding has one term per rank
        return new == Site.EMBEDDING and getattr(wrong.at, "slots", 1) > 1
    if (word.name, new) == ("leaves", 0):
        return True
    least = {"layer": NONE, "window": NONE, "planned": 1}
    return new < least.get(word.name, 0) or (word.name, new) == ("window", 0)


_PLACES = ("sequence", "kv_head", "span", "slot", "head", "blocks")
_NUMBERS = FIXED | {*_PLACES, "layer", "first", "window", "planned", "leaves", "experts"}
"""All other integers are buffer numbers."""


def _look(buffers: Any, number: int) -> object:
    """Return the properties that distinguish buffers."""
    if not 0 <= number < len(buffers):
        return number
    buffer = buffers[number]
    return buffer.role, buffer.shape, buffer.dtype, buffer.rank, buffer.storage, buffer.format


def _value(instruction: Any, word: Word) -> Any:
    value = instruction if word.own else instruction.at
    for name in word.path.split("."):
        value = getattr(value, name)
    return value


def judged_words(
    kind: type[StepInstruction],
    count: int,
    seed: int = 0,
    bases: Sequence[int] = FEW,
    orders_each: int = 1,
    operand: str = "",
) -> tuple[Count, list[WordMutant]]:
    """Return the results for `count` mutants, and those on which verifier and machine disagree.

    One of `orders_each` mutants is also run in other orders.
    """
    counts, strange = Count(), []
    for place, mutant in enumerate(word_mutants(kind, count, seed, bases, operand)):
        verdict = judge_word(mutant, place, orders=place % orders_each == 0)
        counts.add(
            Count(1, verdict.unsafe, verdict.refused, verdict.refused and not verdict.unsafe)
        )
        if verdict.unsafe is not verdict.refused:
            strange.append(mutant)
    return counts, strange
