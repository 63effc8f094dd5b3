"""Checks of the inputs of a launch: a wrong block or position would corrupt another sequence."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from tpcompile.errors import UsageError
from tpcompile.vm.program import Program, Role
from tpcompile.vm.program.buffer import LINEAR_STATES
from tpcompile.vm.program.instruction import StepInstruction

if TYPE_CHECKING:
    from tpcompile.backends.memory import StepMemory


def check_clocks(program: Program) -> None:
    """Raise if an instruction advances a clock that another one advances too.

    `check_launch` relies on one new token per step and sequence.
    """
    clocks = set(program.one_per_rank(Role.CLOCK))
    ends: dict[int, str] = {}
    for instruction in program.instructions:
        for region in instruction.writes:
            if region.buffer not in clocks:
                continue
            if region.buffer in ends:
                raise UsageError(
                    "One instruction of a rank must end a step",
                    where=instruction.label,
                    got=f"a second one after {ends[region.buffer]}",
                )
            ends[region.buffer] = instruction.label


def check_step(
    memory: StepMemory,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    tables: torch.Tensor,
    positions: torch.Tensor,
    starts: Sequence[int],
    stops: Sequence[int],
) -> None:
    """Raise unless the inputs of a step fit the program and its caches."""
    ids, ends, places = tokens.tolist(), lengths.tolist(), positions.tolist()
    block_tables = tables.tolist()
    if not len(ids) == len(ends) == len(places) == len(block_tables) >= 1:
        raise UsageError(
            "A step must have one token, position, length and table per row",
            got=f"{len(ids)} tokens, {len(places)} positions, {len(ends)} lengths, "
            f"{len(block_tables)} tables",
        )
    _at_most("number of rows", len(ids), memory.batch, "batch")
    _at_most("length of a sequence", max(ends), memory.longest, "max_seq_len")
    _at_most("position of a token", max(places), memory.longest - 1, "max_seq_len - 1")
    _at_most(
        "number of blocks per sequence",
        tables.shape[1],
        memory.extent(Role.TABLES, 1),
        "most_blocks",
    )
    _at_most("number of stop tokens", len(stops), memory.extent(Role.STOPS, 0), "stops")
    if min(ends) < 1 or min(places) < 0:
        raise UsageError(
            "Lengths must be at least 1 and positions at least 0",
            got=f"lengths {ends}, positions {places}",
        )
    if not 0 <= min(ids) <= max(ids) < memory.vocabulary:
        raise UsageError(
            "Every token must be in the model's vocabulary",
            got=str(ids),
            expected=f"tokens from 0 to {memory.vocabulary - 1}",
        )
    check_rows(memory, starts, ends, block_tables)
    _check_blocks(memory, sequences_of(starts), ends, ends, block_tables)


def sequence_rows_of(program: Program) -> int:
    """Return the number of rows, from each of its multiples on, that may belong to a sequence."""
    steps = (
        instruction
        for instruction in program.instructions
        if isinstance(instruction, StepInstruction)
    )
    limits = (getattr(step.at, "sequence_rows", None) for step in steps)
    return min((limit for limit in limits if limit is not None), default=1)


def check_states(
    memory: StepMemory,
    starts: Sequence[int],
    lengths: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
) -> None:
    """Raise unless each row has a state to read and one to write, not used by another sequence.

    A row after another one of its sequence must read the state that the other row writes, and may
    write it too. A sequence of one token is new: it reads no state.
    """
    rows = len(lengths)
    held = min(memory.values(role)[0].shape[1] for role in LINEAR_STATES)
    reads, writes = read.tolist(), write.tolist()
    for name, states in (("read", reads), ("write", writes)):
        if len(states) != rows or not all(0 <= state < held for state in states):
            raise UsageError(
                f"Each row must {name} one state",
                got=f"states {states} for {rows} rows",
                expected=f"{rows} numbers from 0 to {held - 1}",
            )
    firsts = set(starts)
    for row in range(1, rows):
        if row not in firsts and reads[row] != writes[row - 1]:
            raise UsageError(
                f"Row {row} must read the state that the row before it writes",
                got=f"state {reads[row]}",
                expected=f"state {writes[row - 1]}",
            )
    numbers = sequences_of(starts)
    writers = {state: number for number, state in reversed([*zip(numbers, writes, strict=True)])}
    used = [
        (numbers[row], reads[row])
        for row, length in enumerate(lengths.tolist())
        if length > 1 and row in firsts
    ]
    for number, state in (*zip(numbers, writes, strict=True), *used):
        writer = writers.get(state, number)
        if writer != number:
            raise UsageError(
                f"Sequence {writer} must not write the state of sequence {number}",
                got=f"state {state} in both",
                expected="a state of its own for each sequence to write",
            )


def sequences_of(starts: Sequence[int]) -> list[int]:
    """Return the number of the sequence of each row."""
    return [number for number, rows in enumerate(pairwise(starts)) for _ in range(*rows)]


def check_launch(memory: StepMemory, starts: Sequence[int], steps: int) -> None:
    """Raise unless there is room for `steps` more steps of the sequences of these rows."""
    if steps < 1:
        raise UsageError(f"steps must be at least 1, got {steps}")
    if steps > 1 and not memory.program.repeats:
        raise UsageError(
            "The program must run one step per launch: its steps do not wait for each other",
            got=f"{steps} steps",
        )
    if steps > 1 and len(starts) <= starts[-1]:
        raise UsageError(
            "Only one step may run in a launch if a sequence has several rows",
            got=f"{steps} steps of {starts[-1]} rows of {len(starts) - 1} sequences",
        )
    _at_most("number of steps in one launch", steps, memory.extent(Role.HISTORY, 0), "steps")
    roles = (Role.FINISHED, Role.LENGTHS, Role.POSITIONS)
    finished, lengths, positions = (memory.values(role)[0].tolist() for role in roles)
    extra_tokens = [
        steps - 1 if length and not ended else 0
        for length, ended in zip(lengths, finished, strict=True)
    ]
    last = [length + added for length, added in zip(lengths, extra_tokens, strict=True)]
    _at_most("final length of a sequence", max(last), memory.longest, "max_seq_len")
    places = [place + added for place, added in zip(positions, extra_tokens, strict=True)]
    _at_most("final position", max(places), memory.longest - 1, "max_seq_len - 1")
    used_blocks = -(-max(last) // memory.block)
    empty = len(lengths) - starts[-1]
    sequences = [*sequences_of(starts), *range(len(starts) - 1, len(starts) - 1 + empty)]
    tables = memory.values(Role.TABLES)[0][:, :used_blocks].tolist()
    _check_blocks(memory, sequences, lengths, last, tables)


def _check_blocks(
    memory: StepMemory,
    sequences: Sequence[int],
    firsts: Sequence[int],
    lengths: Sequence[int],
    tables: Sequence[list[int]],
) -> None:
    """Raise if a token has no valid block, or a new one the slot of a token of another sequence.

    `sequences` has the sequence of each row, `firsts` its length after the first step, and
    `lengths` its length after the last one. Sequences may share past tokens.
    """
    block = memory.block
    blocks = memory.values(Role.CACHE)[0].shape[2] // block
    held: list[list[int]] = []
    written: dict[int, dict[int, int]] = {}
    for row, (first, length, table) in enumerate(zip(firsts, lengths, tables, strict=True)):
        held.append(table[: -(-length // block)])
        if len(held[row]) * block < length or not all(0 <= number < blocks for number in held[row]):
            raise UsageError(
                f"Sequence {sequences[row]} lacks blocks for its {length} tokens",
                got=f"blocks {held[row]} of {block} tokens each",
                expected=f"enough blocks, with numbers from 0 to {blocks - 1}",
            )
        new = max(0, first - 1)
        for place in range(new // block, len(held[row])):
            offset = max(0, new - place * block)
            written.setdefault(held[row][place], {}).setdefault(sequences[row], offset)
    for sequence, length, numbers in zip(sequences, lengths, held, strict=True):
        for place, number in enumerate(numbers):
            for writer, offset in written.get(number, {}).items():
                if writer != sequence and length - place * block > offset:
                    raise UsageError(
                        f"Sequences {writer} and {sequence} must not share the slots of new tokens",
                        got=f"block {number} in both",
                        expected="a block of its own for the new tokens of each sequence",
                    )


def check_rows(
    memory: StepMemory,
    starts: Sequence[int],
    lengths: Sequence[int],
    tables: Sequence[list[int]],
) -> None:
    """Raise unless rows from each of `starts` up to the next are the next tokens of one sequence.

    Each row must be one token longer than the row before it, and in the same blocks. The program
    must order rows that belong together.
    """
    together, block = memory.sequence_rows, memory.block
    if list(starts) != sorted({0, *starts}) or starts[-1] != len(lengths):
        raise UsageError(
            "The starts of sequences must increase from 0 to the number of rows",
            got=f"{list(starts)} for {len(lengths)} rows",
        )
    for first, end in pairwise(starts):
        if first // together != (end - 1) // together:
            raise UsageError(
                "The rows of a sequence must be rows that may belong together in the program",
                got=f"rows {first} to {end - 1}",
                expected="one row per sequence"
                if together == 1
                else f"rows between multiples of {together}",
            )
        for row in range(first + 1, end):
            past = -(-lengths[row - 1] // block)
            if lengths[row] != lengths[row - 1] + 1 or tables[row][:past] != tables[row - 1][:past]:
                raise UsageError(
                    "A row must continue the sequence of the row before it",
                    where=f"row {row}",
                    got=f"length {lengths[row]} after {lengths[row - 1]}, and "
                    f"blocks {tables[row]} after {tables[row - 1]}",
                    expected="one more token in the same blocks",
                )


def _at_most(subject: str, count: int, most: int, name: str) -> None:
    if count > most:
        raise UsageError(
            f"The {subject} must be at most {most}, the program's {name}",
            got=str(count),
            hint="Make a program with a larger limit",
        )
