"""The printer of a program's text, and of one layer with comments."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import is_dataclass
from operator import attrgetter
from typing import Any

from tpcompile.errors import UsageError
from tpcompile.ir.dtypes import DTYPES, dtype_name
from tpcompile.vm.program.buffer import Buffer
from tpcompile.vm.program.instruction import StepInstruction, own_fields
from tpcompile.vm.program.program import Instruction, Program, queue_by_instruction, touched
from tpcompile.vm.program.region import Join, Region, box_text
from tpcompile.vm.program.text.values import (
    name_word,
    operand_types,
    operands_name,
    runs_of,
    shape_word,
    value_word,
)


def format_program(program: Program) -> str:
    """Format a program as text that `parse_program` reads back as an equal program."""
    lines = _Lines(program)
    everything = range(len(program.instructions))
    sections = (
        ("buffers", map(buffer_line, range(len(program.buffers)), program.buffers)),
        ("operands", lines.operands()),
        ("instructions", map(lines.instruction, everything)),
        ("queues", map(_queue, range(len(program.queues)), program.queues)),
    )
    parts = [_header(program)]
    for name, body in sections:
        parts += ["", name, *(f"  {line}" for line in body)]
    return "\n".join(parts) + "\n"


def format_layer(program: Program, layer: int, rank: int | None = None) -> str:
    """Format one layer (-1: outside the layers), with the regions that each instruction touches.

    The lines are those of `format_program`. Comments after `#` name the queue and the regions; a
    region in another rank's memory has `@` and the rank.
    """
    lines = _Lines(program)
    shown = [
        number
        for number, instruction in enumerate(lines.instructions)
        if instruction.layer == layer and rank in (None, instruction.rank)
    ]
    if not shown:
        layers, ranks = (
            max((getattr(i, name) for i in lines.instructions), default=-1)
            for name in ("layer", "rank")
        )
        raise UsageError(
            f"The program has no instruction of layer {layer}"
            + ("" if rank is None else f" on rank {rank}"),
            expected=f"a layer from 0 to {layers}"
            + ("" if rank is None else f", and a rank from 0 to {ranks}"),
        )
    operands = {lines.number_of(lines.instructions[number]) for number in shown}
    buffers = _touched(lines, shown)
    queue_of = queue_by_instruction(program.queues)
    parts = [_header(program)]
    parts += ["", "buffers", *(f"  {buffer_line(n, program.buffers[n])}" for n in buffers)]
    parts += ["", "operands", *(f"  {line}" for line in lines.operands(operands))]
    parts += ["", "instructions"]
    for number in shown:
        parts.append(f"  {lines.instruction(number)}")
        parts += [f"      # {comment}" for comment in lines.comments(number, queue_of.get(number))]
    return "\n".join(parts) + "\n"


def buffer_line(number: int, buffer: Buffer) -> str:
    """Format a buffer with all its fields."""
    dtype = dtype_name(buffer.dtype)
    if dtype not in DTYPES:
        raise UsageError(
            f"The buffer {buffer.name} has the unsupported dtype {dtype}",
            expected=f"one of {', '.join(DTYPES)}",
        )
    line = f"b{number} {name_word(buffer.name)} rank={buffer.rank} role={buffer.role.word}"
    line += f" dtype={dtype} shape={shape_word(buffer.shape)}"
    if buffer.format is not None:
        line += f" format={buffer.format} first={buffer.first}"
    return line if buffer.storage is None else f"{line} storage={shape_word(buffer.storage)}"


def _header(program: Program) -> str:
    return (
        f"program {name_word(program.name)} ranks={program.ranks} sharing={program.sharing} "
        f"repeats={value_word(program.repeats)} counters={program.counters}"
    )


def _queue(worker: int, queue: Sequence[int]) -> str:
    return " ".join([f"w{worker}", *runs_of(queue)])


def _touched(lines: _Lines, shown: Collection[int]) -> list[int]:
    """Return the buffers that these instructions touch."""
    buffers = {
        region.buffer
        for number in shown
        for region in touched(lines.instructions[number])
        if 0 <= region.buffer < len(lines.program.buffers)
    }
    return sorted(buffers)


class _Lines:
    """The formatter of lines. Shared operands are numbered by first use; equal ones are merged."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.instructions = [_written(instruction) for instruction in program.instructions]
        self._numbers: dict[Any, int] = {}
        self._by_identity: dict[int, int] = {}
        for instruction in self.instructions:
            self.number_of(instruction)

    def number_of(self, instruction: StepInstruction) -> int:
        """Return the number of the shared operands. Hashing is slow, so hash each object once."""
        key = id(instruction.at)
        if key not in self._by_identity:
            number = self._numbers.setdefault(instruction.at, len(self._numbers))
            self._by_identity[key] = number
        return self._by_identity[key]

    def operands(self, shown: Collection[int] | None = None) -> Iterator[str]:
        for operands, number in self._numbers.items():
            if shown is None or number in shown:
                yield f"a{number} {_operands(operands)}"

    def instruction(self, number: int) -> str:
        instruction = self.instructions[number]
        words = [f"i{number}", instruction.name, f"a{self.number_of(instruction)}"]
        words += [f"{name}={value_word(value)}" for name, value in own_fields(instruction)]
        waits, signals = self.program.waits[number], self.program.signals[number]
        if waits:
            words += ["wait", *(f"c{wait.counter}>={wait.until}" for wait in waits)]
        if signals:
            words += ["signal", *(f"c{counter}" for counter in signals)]
        return " ".join(words)

    def comments(self, number: int, queue: int | None) -> Iterator[str]:
        instruction = self.instructions[number]
        rank = instruction.rank
        yield f"{'no queue' if queue is None else f'queue {queue}'}, rank {rank}"
        for verb, regions in (("reads", instruction.reads), ("writes", instruction.writes)):
            if regions:
                yield f"{verb} {', '.join(self._region(region, rank) for region in regions)}"
        for join in instruction.joins:
            yield f"joins {self._join(join, rank)}"

    def _join(self, join: Join, rank: int) -> str:
        start, stop = join.part
        rows = f"rows {start}:{stop} of {join.whole}, one of {join.arrivals} blocks"
        return f"{self._region(join.region, rank)}, {rows}"

    def _region(self, region: Region, rank: int) -> str:
        """Format a region by name, with the rank if it is in another rank's memory."""
        if not 0 <= region.buffer < len(self.program.buffers):
            return f"b{region.buffer}{box_text(region.box)}"
        buffer = self.program.buffers[region.buffer]
        of = "" if buffer.rank == rank else f"@{buffer.rank}"
        return f"{buffer.name}{of}{box_text(region.box)}"


def _written(instruction: Instruction) -> StepInstruction:
    if isinstance(instruction, StepInstruction) and is_dataclass(instruction.at):
        return instruction
    raise UsageError(
        f"{instruction.name} has no text form",
        expected="an instruction of tpcompile.vm.groups",
    )


def _operands(operands: Any) -> str:
    values = (
        f"{path}={value_word(attrgetter(path)(operands))}" for path in operand_types(type(operands))
    )
    return " ".join([operands_name(type(operands)), *values])
