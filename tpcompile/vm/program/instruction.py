"""What the instructions of a decode step have in common: operands, words, regions, a cost.

An instruction is a frozen dataclass of whole numbers, ranges and fractions. What all instructions
of one group share is one object, `at`, and what each has for itself stands beside it. Both
together are the words that an executor dispatches on.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import IntEnum
from functools import cache, cached_property
from typing import Any, ClassVar, NamedTuple, Protocol, get_type_hints

import torch

from tpcompile.vm.program.region import Join, Region
from tpcompile.vm.targets import Target

NONE = -1
"""In the place of a buffer: the operand is missing, as the bias of a linear without one."""

Memory = Sequence[torch.Tensor]
"""The tensor of each buffer."""


class Range(NamedTuple):
    """From `start` up to `stop`, which is no longer in it."""

    start: int
    stop: int

    @property
    def extent(self) -> int:
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


class Probe(Protocol):
    """Is shown what an instruction computes on its way, `[sequences, columns]` of a value."""

    def __call__(
        self, name: str, sequences: Range, columns: Range, values: torch.Tensor
    ) -> None: ...


def unseen(name: str, sequences: Range, columns: Range, values: torch.Tensor) -> None:
    """The probe of those who do not look."""


def fraction(number: float) -> float:
    """A number as an instruction keeps it: rounded to fp32, in which it is used."""
    rounded: float = struct.unpack("<f", struct.pack("<f", number))[0]
    return rounded


def columns_of(buffer: int, batch: int, columns: Range) -> Region:
    """These columns of all sequences."""
    return Region(buffer, ((0, batch), columns))


def present(*regions: Region) -> tuple[Region, ...]:
    """Those whose buffer is not missing: for operands that may be."""
    return tuple(region for region in regions if region.buffer != NONE)


def with_bias(memory: Memory, bias: int, rows: Range, found: torch.Tensor) -> torch.Tensor:
    """What was found for some rows in fp32, and their bias if there is one."""
    return found if bias == NONE else found + memory[bias][rows.slice].float()


@dataclass(frozen=True)
class StepInstruction:
    """Base of the instructions: a subclass adds operands, regions, its traffic and its meaning."""

    at: Any

    name: ClassVar[str]
    """As in text and messages."""
    opcode: ClassVar[int]
    """The first word of its row. Instructions of other packages have one above 255."""

    @property
    def rank(self) -> int:
        found: int = self.at.rank
        return found

    @property
    def layer(self) -> int:
        """The layer, or -1 outside of the layers."""
        found: int = self.at.layer
        return found

    @cached_property
    def reads(self) -> tuple[Region, ...]:
        raise NotImplementedError

    @cached_property
    def writes(self) -> tuple[Region, ...]:
        raise NotImplementedError

    @property
    def joins(self) -> tuple[Join, ...]:
        return ()

    @property
    def traffic(self) -> int:
        """The bytes that it has to bring in: of weights or of the cache; all else is small."""
        raise NotImplementedError

    def cost(self, target: Target) -> float:
        """Microseconds on one worker of a target."""
        return target.instruction_us + self.traffic / target.worker_bytes_per_us

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        """What it means."""
        raise NotImplementedError

    @property
    def label(self) -> str:
        """The instruction in a line: what it is, where it belongs and what it alone does."""
        kinds = [v.name.lower() for v in vars(self.at).values() if isinstance(v, IntEnum)]
        where = [] if self.layer < 0 else [f"layer {self.layer}"]
        own = [f"{name}={_shown(value)}" for name, value in own_fields(self)]
        return " ".join([self.name, *kinds, *where, f"rank {self.rank}", *own])


def own_fields(instruction: StepInstruction) -> Iterator[tuple[str, Any]]:
    """What this instruction alone has."""
    for field in fields(instruction):
        if field.name != "at":
            yield field.name, getattr(instruction, field.name)


def _shown(value: Any) -> str:
    return f"{value.start}:{value.stop}" if isinstance(value, Range) else str(value)


@cache
def field_types(kind: Any) -> tuple[tuple[str, Any], ...]:
    """The fields of a dataclass with their types, in order."""
    hints = get_type_hints(kind)
    return tuple((field.name, hints[field.name]) for field in fields(kind))


@cache
def field_rules(kind: Any) -> Mapping[str, Any]:
    """By field, what its `Annotated` type says beside the type."""
    hints = get_type_hints(kind, include_extras=True)
    found = {field.name: getattr(hints[field.name], "__metadata__", ()) for field in fields(kind)}
    return {name: extras[0] for name, extras in found.items() if extras}


def _has_fields(kind: Any) -> bool:
    return is_dataclass(kind)


def word_count(kind: Any) -> int:
    """How many words a value of this type takes."""
    if _has_fields(kind):
        return sum(word_count(inner) for _, inner in field_types(kind))
    return 2 if kind is Range else 1


def words_of(value: Any) -> Iterator[int]:
    """A value as words: the operands one after the other, fractions by their fp32 bits."""
    if _has_fields(value):
        kind: Any = type(value)
        for name, _ in field_types(kind):
            yield from words_of(getattr(value, name))
    elif isinstance(value, Range):
        yield from value
    elif isinstance(value, float):
        yield int.from_bytes(struct.pack("<f", value), "little", signed=True)
    else:
        yield int(value)


def from_words(kind: Any, words: Iterator[int]) -> Any:
    """The value of this type that has these words; ValueError if there is none."""
    if _has_fields(kind):
        return kind(*[from_words(inner, words) for _, inner in field_types(kind)])
    if kind is Range:
        return Range(next(words), next(words))
    if kind is float:
        return struct.unpack("<f", struct.pack("<i", next(words)))[0]
    word = next(words)
    if kind is bool and word not in (0, 1):
        raise ValueError(f"{word} is not a valid bool")
    return kind(word)
