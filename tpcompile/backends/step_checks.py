"""Checks of the inputs of a launch: a wrong block or position would corrupt another sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tpcompile.errors import UsageError
from tpcompile.vm.program import Program, Role
from tpcompile.vm.program.buffer import LINEAR_STATES

if TYPE_CHECKING:
    from tpcompile.backends.memory import StepMemory


def check_clocks(program: Program) -> None:
    """Raise if an instruction advances a clock that another one advances too.

    `check_launch` relies on one new token per step and sequence.
    """
    clocks = set(program.one_per_rank(Role.CLOCK))
    ends: dict[int, str] = {}
    for one in program.instructions:
        for region in one.writes:
            if region.buffer not in clocks:
                continue
            if region.buffer in ends:
                raise UsageError(
                    "One instruction of a rank must end a step",
                    where=one.label,
                    got=f"a second one after {ends[region.buffer]}",
                )
            ends[region.buffer] = one.label


def check_step(
    memory: StepMemory,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    tables: torch.Tensor,
    positions: torch.Tensor,
    stops: Sequence[int],
) -> None:
    """Raise unless the inputs of a step fit the program and its caches."""
    if not len(tokens) == len(lengths) == len(positions) == len(tables) >= 1:
        raise UsageError(
            "A step must have one token, position, length and table per sequence",
            got=f"{len(tokens)} tokens, {len(positions)} positions, {len(lengths)} lengths, "
            f"{len(tables)} tables",
        )
    ids, ends, places = tokens.tolist(), lengths.tolist(), positions.tolist()
    _at_most("number of sequences", len(ids), memory.batch, "batch")
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
    logits = memory.program.one_per_rank(Role.LOGITS)
    vocabulary = sum(memory.program.buffers[number].shape[1] for number in logits)
    if not 0 <= min(ids) <= max(ids) < vocabulary:
        raise UsageError(
            "Every token must be in the model's vocabulary",
            got=str(ids),
            expected=f"tokens from 0 to {vocabulary - 1}",
        )
    _check_blocks(memory, ends, ends, tables.tolist())


def check_states(
    memory: StepMemory, lengths: torch.Tensor, read: torch.Tensor, write: torch.Tensor
) -> None:
    """Raise unless each sequence has states to read and to write, and writes no other's state.

    A sequence of one token is new: it does not use the state that it is said to read.
    """
    sequences = len(lengths)
    held = min(memory.values(role)[0].shape[1] for role in LINEAR_STATES)
    reads, writes = read.tolist(), write.tolist()
    for name, states in (("read", reads), ("write", writes)):
        if len(states) != sequences or not all(0 <= one < held for one in states):
            raise UsageError(
                f"Each sequence must {name} one state",
                got=f"states {states} for {sequences} sequences",
                expected=f"{sequences} numbers from 0 to {held - 1}",
            )
    writers = {state: row for row, state in reversed([*enumerate(writes)])}
    used = [(row, reads[row]) for row, length in enumerate(lengths.tolist()) if length > 1]
    for row, state in (*enumerate(writes), *used):
        writer = writers.get(state, row)
        if writer != row:
            raise UsageError(
                f"Sequence {writer} must not write the state of sequence {row}",
                got=f"state {state} in both",
                expected="a state of its own for each sequence to write",
            )


def check_launch(memory: StepMemory, steps: int) -> None:
    """Raise unless there is room for `steps` more steps."""
    if steps < 1:
        raise UsageError(f"steps must be at least 1, got {steps}")
    if steps > 1 and not memory.program.repeats:
        raise UsageError(
            "The program must run one step per launch: its steps do not wait for each other",
            got=f"{steps} steps",
        )
    _at_most("number of steps in one launch", steps, memory.extent(Role.HISTORY, 0), "steps")
    roles = (Role.FINISHED, Role.LENGTHS, Role.POSITIONS)
    finished, lengths, positions = (memory.values(role)[0].tolist() for role in roles)
    more = [
        steps - 1 if length and not ended else 0
        for length, ended in zip(lengths, finished, strict=True)
    ]
    last = [length + added for length, added in zip(lengths, more, strict=True)]
    _at_most("final length of a sequence", max(last), memory.longest, "max_seq_len")
    places = [place + added for place, added in zip(positions, more, strict=True)]
    _at_most("final position", max(places), memory.longest - 1, "max_seq_len - 1")
    used = -(-max(last) // memory.block)
    _check_blocks(memory, lengths, last, memory.values(Role.TABLES)[0][:, :used].tolist())


def _check_blocks(
    memory: StepMemory,
    firsts: Sequence[int],
    lengths: Sequence[int],
    tables: Sequence[list[int]],
) -> None:
    """Raise if a token has no valid block, or a new one the slot of a token of another sequence.

    Sequences are `firsts` tokens long after the first step, and `lengths` after the last one. They
    may share past tokens.
    """
    block = memory.block
    blocks = memory.values(Role.CACHE)[0].shape[2] // block
    held: list[list[int]] = []
    for row, (length, table) in enumerate(zip(lengths, tables, strict=True)):
        held.append(table[: -(-length // block)])
        if len(held[row]) * block < length or not all(0 <= one < blocks for one in held[row]):
            raise UsageError(
                f"Sequence {row} lacks blocks for its {length} tokens",
                got=f"blocks {held[row]} of {block} tokens each",
                expected=f"enough blocks, with numbers from 0 to {blocks - 1}",
            )
    written = {
        held[row][place]: (row, max(0, first - 1 - place * block))
        for row, first in enumerate(firsts)
        for place in range(max(0, first - 1) // block, len(held[row]))
    }
    for row, length in enumerate(lengths):
        for place, number in enumerate(held[row]):
            writer, first = written.get(number, (row, 0))
            if writer != row and length - place * block > first:
                raise UsageError(
                    f"Sequences {writer} and {row} must not share the slots of new tokens",
                    got=f"block {number} in both",
                    expected="a block of its own for the new tokens of each sequence",
                )


def _at_most(what: str, found: int, most: int, name: str) -> None:
    if found > most:
        raise UsageError(
            f"The {what} must be at most {most}, the program's {name}",
            got=str(found),
            hint="Make a program with a larger limit",
        )
