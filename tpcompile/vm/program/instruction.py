"""The base class of a decode step's instructions: operands, words, regions and cost.

An instruction is a frozen dataclass of integers, ranges and floats. The operands that all
instructions of one group share are one object, `at`; each instruction's own operands are its other
fields. Together they are the words that an executor dispatches on.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from tpcompile.ir.dtypes import DType
from tpcompile.ir.format import Kind
from tpcompile.lazy import cached_property
from tpcompile.vm.program.accesses import joins_of, regions_of
from tpcompile.vm.program.buffer import Box
from tpcompile.vm.program.fields import field_types, has_fields, own_types
from tpcompile.vm.program.meaning import HeadRead, Result, Values
from tpcompile.vm.program.region import NONE as NONE
from tpcompile.vm.program.region import Join, Region
from tpcompile.vm.program.region import Range as Range
from tpcompile.vm.program.rules import Arrival
from tpcompile.vm.targets import Target

Memory = Sequence[torch.Tensor]
"""The tensors of all buffers, indexed by buffer number."""


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


def with_bias(memory: Memory, bias: int, rows: Range, values: torch.Tensor) -> torch.Tensor:
    """Add the bias of some rows, if there is one, to their fp32 values."""
    return values if bias == NONE else values + memory[bias][rows.slice].float()


class Parts(NamedTuple):
    """The parts of an instruction's time on a worker."""

    fixed_us: float
    """Launch overhead plus elementwise time."""
    traffic: float
    """The bytes that it loads from memory, which all workers share."""
    work_us: float
    """The time of its arithmetic, during which it loads."""

    def total(self, bytes_per_us: float) -> float:
        """Return the microseconds if the worker loads at this rate, in bytes per µs."""
        return self.fixed_us + max(self.traffic / bytes_per_us, self.work_us)


@dataclass(frozen=True)
class StepInstruction:
    """Base class of instructions. A subclass adds operands with rules, its traffic and `run`.

    The regions that it reads, writes and joins follow from the rules.
    """

    at: Any

    name: ClassVar[str]
    """The name in text and messages."""
    opcode: ClassVar[int]
    """The first word of the encoded row. Instructions of other packages use opcodes above 255."""
    arrival: ClassVar[Arrival | None] = None
    """The operands of its joins, for an instruction that is one of several blocks."""
    apart: ClassVar[tuple[str, ...]] = ()
    """The own operands on which the values that it makes depend, beside their tiles."""
    immaterial: ClassVar[tuple[str, ...]] = ()
    """The shared operands that change no value, such as those of costs alone."""
    reads_head: ClassVar[HeadRead | None] = None
    """The own operands that assign heads to the readers among its tiles."""

    @property
    def rank(self) -> int:
        rank: int = self.at.rank
        return rank

    @property
    def layer(self) -> int:
        """The layer, or -1 outside the layers."""
        layer: int = self.at.layer
        return layer

    @cached_property
    def reads(self) -> tuple[Region, ...]:
        return regions_of(self, "reads")

    @cached_property
    def writes(self) -> tuple[Region, ...]:
        return regions_of(self, "writes")

    @cached_property
    def joins(self) -> tuple[Join, ...]:
        return () if self.arrival is None else joins_of(self)

    @property
    def traffic(self) -> int:
        """The bytes that the instruction loads from memory, without small operands."""
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
        return Parts(fixed, self.traffic, self.work / self.macs_per_us(target))

    def macs_per_us(self, target: Target) -> float:
        """Return the multiply-accumulates of one worker of a target per µs of this instruction."""
        return target.worker_macs_per_us

    def cost(self, target: Target) -> float:
        """Estimate the microseconds that the instruction takes if all workers are loading."""
        return self.parts(target).total(target.worker_bytes_per_us)

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        """Execute the instruction on reference memory.

        The probe receives values that are not stored; `report` sends it the stored ones.
        """
        raise NotImplementedError

    def meaning(self, values: Values) -> Iterator[Result]:
        """Yield the whole values of which the instruction makes a part, from those that it reads.

        Instructions with the same shared operands and the same operands in `apart` make parts of
        the same values. `run` makes exactly the parts that the instruction writes.
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
        operands = [f"{name}={_shown(value)}" for name, value in own_fields(self)]
        return " ".join([self.name, *kinds, *where, f"rank {self.rank}", *operands])


@dataclass(frozen=True)
class WeightInstruction(StepInstruction):
    """Base class of instructions that multiply part of a weight with the values of all sequences.

    The operands have a `batch`, a `weight` and its `format`. If the instruction reads several parts
    of the weight, they are rows of the same columns.
    """

    @property
    def weight_boxes(self) -> list[Box]:
        """The parts of the weight that the instruction reads, in order."""
        number = self.at.weight
        return [box for buffer, box in self.reads if buffer == number]

    @property
    def first_box(self) -> Box | None:
        """The part that it reads first, if that is known before the step."""
        return self.weight_boxes[0]

    @cached_property
    def weight_shape(self) -> tuple[int, int]:
        """The number of rows and of columns of the weight that the instruction multiplies."""
        boxes = self.weight_boxes
        start, stop = boxes[0][1]
        return sum([last - first for (first, last), _ in boxes]), stop - start

    @property
    def source(self) -> Any:
        """The operands of the values that the weight multiplies; `x` is their buffer."""
        return getattr(self.at, "normed", self.at)

    @property
    def traffic(self) -> int:
        rows, _ = self.weight_shape
        row: int = self.at.format.row_bytes(*self.weight_boxes[0][1])
        return rows * row

    @property
    def work(self) -> int:
        rows, columns = self.weight_shape
        batch: int = self.at.batch
        return rows * columns * batch

    def macs_per_us(self, target: Target) -> float:
        """Return the rate of matrix units, which do not multiply in fp32."""
        if self.at.format.kind == Kind.F32:
            return target.worker_macs_per_us
        return target.worker_matrix_macs_per_us

    @property
    def values(self) -> int:
        """The values that enter and leave the product."""
        batch: int = self.at.batch
        return batch * sum(self.weight_shape)


def own_fields(instruction: StepInstruction) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each operand that the instruction does not share."""
    kind: Any = type(instruction)
    for name in own_types(kind):
        yield name, getattr(instruction, name)


def _shown(value: Any) -> str:
    return f"{value.start}:{value.stop}" if isinstance(value, Range) else str(value)


def word_count(kind: Any) -> int:
    """Return the number of words that a value of this type takes."""
    if has_fields(kind):
        return sum(word_count(inner) for _, inner in field_types(kind))
    return 2 if kind is Range else 1


def words_of(value: Any) -> Iterator[int]:
    """Yield the words of a value: its operands in order, floats as their fp32 bits."""
    if has_fields(value):
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
    if has_fields(kind):
        return kind(*[from_words(inner, words) for _, inner in field_types(kind)])
    if kind is Range:
        return Range(next(words), next(words))
    if kind is float:
        return struct.unpack("<f", struct.pack("<i", next(words)))[0]
    word = next(words)
    if kind is bool and word not in (0, 1):
        raise ValueError(f"{word} is not a valid bool")
    return kind(word)
