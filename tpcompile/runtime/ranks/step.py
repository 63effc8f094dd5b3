"""Data sent to ranks: the inputs of a step, and the program that runs decode steps."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from tpcompile.backends.executor import Executor
from tpcompile.backends.rotation import Rotation
from tpcompile.backends.share import SharedLayout
from tpcompile.vm.program import Program
from tpcompile.vm.program.encoding import EncodedProgram, decode_program, encode_program

MOST_ROWS = 16
"""The maximum number of rows in a step if a sequence has several. More rows take several steps."""


@dataclass(frozen=True)
class Routing:
    """A request for the choices of all routers, after the result of a step."""

    experts: tuple[torch.Tensor, ...] = ()
    """The experts of each token that routers choose instead, by router; empty to leave them."""


@dataclass(frozen=True)
class Step:
    """The inputs and the requested output of one run of all ranks.

    A program may run several steps at once; the first one has these inputs.
    """

    inputs: Mapping[str, torch.Tensor]
    """The inputs of the graph by name, except the cache, which each rank stores."""
    output: str
    """The result to return: `logits` or `tokens`."""
    blocks: int = 0
    """The number of KV cache blocks that each rank must have."""
    copies: Sequence[tuple[int, int]] = field(default=())
    """Blocks to copy before the step, as pairs (source, target)."""
    states: int = field(default=0, kw_only=True)
    """The number of states of linear attention that each rank must have."""
    steps: int = 1
    """The number of steps to run, fewer if all sequences end."""
    stops: tuple[int, ...] = ()
    """The tokens that end a sequence."""
    routing: Routing | None = field(default=None, kw_only=True)
    """A request for the choices of routers, which modules answer; None for the result alone."""
    few: bool = field(default=False, kw_only=True)
    """Whether a program, not modules, computes sequences with few new tokens: see `most_tokens`."""
    rows: bool = False
    """Whether a program computes each token as a row, also several tokens of a sequence."""
    timed: bool = False
    """Whether a program records the times of the last step's instructions."""


def digest(step: Step) -> torch.Tensor:
    """Return two integers that differ if the inputs of a step differ."""
    hasher = hashlib.blake2b(digest_size=16)
    fields = (
        *(step.output, step.blocks, list(step.copies), step.states, step.steps, step.stops),
        *(step.routing is not None, step.few, step.rows),
    )
    hasher.update(repr(fields).encode())
    experts = step.routing.experts if step.routing else ()
    routed = {f"router {number}": ids for number, ids in enumerate(experts)}
    for name, value in {**step.inputs, **routed}.items():
        hasher.update(f"{name} {tuple(value.shape)}".encode())
        hasher.update(memoryview(value.contiguous().numpy()))  # type: ignore[arg-type]
    return torch.frombuffer(bytearray(hasher.digest()), dtype=torch.long)


class StepCounts(NamedTuple):
    """The numbers of steps that programs and modules have run, and of guessed tokens."""

    program: int
    modules: int
    drafted: int
    """The tokens that were guessed, and computed as rows."""
    accepted: int
    """The drafted tokens that equal the tokens of plain decoding."""


class ProgramSize(NamedTuple):
    """The parameters that distinguish the programs of a model."""

    batch: int
    """The number of rows, one of those that `size_for` returns."""
    sequence_rows: int = 1
    """The number of rows that may belong to one sequence: one, or all of them."""


def size_for(rows: int, parts: int = Executor.size_parts) -> int:
    """Return the rows of the program for `rows` rows; `parts` is `size_parts` of the executor."""
    part = max(1, (1 << (rows - 1).bit_length()) // parts)
    return -(-rows // part) * part


@dataclass(frozen=True)
class StepCode:
    """A program for steps, and the executor that runs it."""

    program: Program
    size: ProgramSize
    rotation: Rotation
    executor: str
    """The name of the executor."""

    @property
    def memory(self) -> int:
        """The bytes that ranks share if each is a process."""
        return SharedLayout.of(self.program).size

    def encoded(self) -> EncodedCode:
        """Return the same with the program encoded as words, for sending."""
        words = encode_program(self.program)
        bare = replace(self.program, instructions=(), queues=(), waits=(), signals=())
        return EncodedCode(words, replace(self, program=bare))


@dataclass(frozen=True)
class EncodedCode:
    """A program for steps, as words."""

    words: EncodedProgram
    rest: StepCode
    """The same without instructions, queues and counters."""

    def decoded(self) -> StepCode:
        """Decode the words. Raise if operands do not agree with buffers."""
        return replace(self.rest, program=decode_program(self.words, self.rest.program))
