"""The base class of a decode step's instructions: operands, words, regions and cost.

An instruction is a frozen dataclass of integers, ranges and floats. The operands that all
instructions of one group share are one object, `at`; each instruction's own operands are its other
fields. Together they are the words that an executor dispatches on.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import IntEnum
from functools import cache
from typing import Any, ClassVar, NamedTuple, Protocol, get_type_hints

import torch

from tpcompile.lazy import cached_property
from tpcompile.vm.program.buffer import DType
from tpcompile.vm.program.region import Join, Region
from tpcompile.vm.targets import Target

NONE = -1
"""The buffer number of an absent operand, such as the bias of a linear without one."""

Memory = Sequence[torch.Tensor]
"""The tensors of all buffers, indexed by buffer number."""


class Range(NamedTuple):
    """A half-open interval: `start` is included, `stop` is not."""

    start: int
    stop: int

    @property
    def extent(self) -> int:
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


class Probe(Protocol):
    """A callback that receives intermediate values: `[sequences, columns]` of a named value."""

    def __call__(
        self, name: str, sequences: Range, columns: Range, values: torch.Tensor
    ) -> None: ...


def unseen(name: str, sequences: Range, columns: Range, values: torch.Tensor) -> None:
    """Ignore intermediate values: the no-op probe."""


def to_fp32(number: float) -> float:
    """Round a number to fp32, the format of float operands."""
    rounded: float = struct.unpack("<f", struct.pack("<f", number))[0]
    return rounded


def columns_of(buffer: int, batch: int, columns: Range) -> Region:
    """Return the region of these columns in all sequences."""
    return Region(buffer, ((0, batch), columns))


def present(*regions: Region) -> tuple[Region, ...]:
    """Drop the regions of absent optional operands."""
    return tuple(region for region in regions if region.buffer != NONE)


def with_bias(memory: Memory, bias: int, rows: Range, found: torch.Tensor) -> torch.Tensor:
    """Add the bias of some rows, if there is one, to their fp32 values."""
    return found if bias == NONE else found + memory[bias][rows.slice].float()


class Parts(NamedTuple):
    """The parts of an instruction's time on a worker."""

    fixed_us: float
    """The time before it loads, and that of values."""
    traffic: float
    """The bytes that it loads from memory, which all workers share."""
    work_us: float
    """The time of its arithmetic, during which it loads."""

    def total(self, bytes_per_us: float) -> float:
        """Return the microseconds if the worker loads so many bytes per µs."""
        return self.fixed_us + max(self.traffic / bytes_per_us, self.work_us)


@dataclass(frozen=True)
class StepInstruction:
    """Base class of instructions. A subclass adds operands, regions, its traffic and `run`."""

    at: Any

    name: ClassVar[str]
    """The name in text and messages."""
    opcode: ClassVar[int]
    """The first word of the encoded row. Instructions of other packages use opcodes above 255."""

    @property
    def rank(self) -> int:
        found: int = self.at.rank
        return found

    @property
    def layer(self) -> int:
        """The layer, or -1 outside the layers."""
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
        """The bytes of weights or cache that the instruction loads; other loads are negligible."""
        raise NotImplementedError

    @property
    def work(self) -> int:
        """The multiply-accumulates for all sequences, 0 if negligible."""
        return 0

    @property
    def values(self) -> int:
        """The values of sequences that the instruction norms, converts or activates."""
        return 0

    def parts(self, target: Target) -> Parts:
        """Estimate the parts of the instruction's time on one worker of a target.

        A worker multiplies while it loads. Weights are loaded once for all sequences, so a large
        batch takes as long as its arithmetic. The values of sequences take additional time.
        """
        fixed = target.instruction_us + self.values * target.value_us
        return Parts(fixed, self.traffic, self.work / target.worker_macs_per_us)

    def cost(self, target: Target) -> float:
        """Estimate the microseconds that the instruction takes if all workers are loading."""
        return self.parts(target).total(target.worker_bytes_per_us)

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        """Execute the instruction on reference memory.

        The probe receives values that are not stored; `report` sends it the stored ones.
        """
        raise NotImplementedError

    def report(self, memory: Memory, probe: Probe) -> None:
        """Send the values that the instruction has just stored to a probe.

        Terms of a sum are not reported, and keys and values are read from the cache.
        """

    @property
    def label(self) -> str:
        """A one-line description: the instruction, its layer and rank, and its own operands."""
        shared = vars(self.at).values()
        kinds = [
            value.name.lower()
            for value in shared
            if isinstance(value, IntEnum) and not isinstance(value, DType)
        ]
        layer = self.layer
        where = [] if layer < 0 else [f"layer {layer}"]
        own = [f"{name}={_shown(value)}" for name, value in own_fields(self)]
        return " ".join([self.name, *kinds, *where, f"rank {self.rank}", *own])


@dataclass(frozen=True)
class WeightInstruction(StepInstruction):
    """Base class of instructions that multiply part of a weight with the values of all sequences.

    The operands have a `batch` and the `dtype` of the weight.
    """

    @property
    def weights(self) -> int:
        """The number of weights that the instruction loads."""
        raise NotImplementedError

    @property
    def traffic(self) -> int:
        itemsize: int = self.at.dtype.itemsize
        return self.weights * itemsize

    @property
    def work(self) -> int:
        batch: int = self.at.batch
        return self.weights * batch

    @property
    def inputs(self) -> int:
        """The number of columns of the weight that the instruction multiplies."""
        raise NotImplementedError

    @property
    def values(self) -> int:
        """The values that enter and leave the product."""
        batch: int = self.at.batch
        return batch * (self.inputs + self.weights // self.inputs)


def own_fields(instruction: StepInstruction) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each operand that the instruction does not share."""
    kind: Any = type(instruction)
    for name in _own_names(kind):
        yield name, getattr(instruction, name)


@cache
def _own_names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.name != "at")


def _shown(value: Any) -> str:
    return f"{value.start}:{value.stop}" if isinstance(value, Range) else str(value)


@cache
def field_types(kind: Any) -> tuple[tuple[str, Any], ...]:
    """Return the fields of a dataclass with their types, in order."""
    hints = get_type_hints(kind)
    return tuple((field.name, hints[field.name]) for field in fields(kind))


def operands_of(kind: Any) -> Any:
    """Return the class of the operands that instructions of this kind share."""
    return dict(field_types(kind))["at"]


@cache
def flat_fields(kind: Any) -> tuple[tuple[str, type], ...]:
    """Return the fields of a dataclass in order; a nested field is named `outer.inner`."""
    found: list[tuple[str, type]] = []
    for name, inner in field_types(kind):
        if _has_fields(inner):
            found += [(f"{name}.{deeper}", last) for deeper, last in flat_fields(inner)]
        else:
            found.append((name, inner))
    return tuple(found)


@cache
def field_rules(kind: Any) -> Mapping[str, Any]:
    """Return the rule in the `Annotated` type of each field that has one."""
    hints = get_type_hints(kind, include_extras=True)
    found = {field.name: getattr(hints[field.name], "__metadata__", ()) for field in fields(kind)}
    return {name: extras[0] for name, extras in found.items() if extras}


def _has_fields(kind: Any) -> bool:
    return is_dataclass(kind)


def word_count(kind: Any) -> int:
    """Return the number of words that a value of this type takes."""
    if _has_fields(kind):
        return sum(word_count(inner) for _, inner in field_types(kind))
    return 2 if kind is Range else 1


def words_of(value: Any) -> Iterator[int]:
    """Yield the words of a value: its operands in order, floats as their fp32 bits."""
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
    """Decode a value of this type. Raise ValueError if the words are not valid for the type."""
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
