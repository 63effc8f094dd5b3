"""Emission of the kernel: one branch per distinct shape, and the loop of a worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tpcompile.backends.executor import refuse_formats
from tpcompile.backends.triton.branches import Branch, branch_of, constant_text
from tpcompile.vm.groups.delta import DeltaStep
from tpcompile.vm.groups.experts import ExpertTerms, NormExperts
from tpcompile.vm.groups.qkv import NormQkvRopeAppend, NormQkvRows
from tpcompile.vm.program import Program, Role
from tpcompile.vm.program.instruction_set import INSTRUCTIONS

TILES = "tpcompile.backends.triton.tiles"

_HEAD = '''\
"""A decode step of {name} as one kernel: a worker per program, and a branch per shape."""

import triton
import triton.language as tl

from {tiles} import {modules}


@triton.jit
def run(branch, words, buffers, own):
    """Run an instruction: its branch, its words, the table of buffers, the worker's memory."""
'''

_TOGETHER = '''

@triton.jit
def together(words, branches, buffers, scratch, numbers):
    """Run an instruction in each program of the grid, without waits and signals."""
    place = tl.program_id(0)
    number = tl.load(numbers + place)
    own = scratch + place * {scratch}
    run(tl.load(branches + number), words + number * {row}, buffers, own)
'''

_LOOP = '''

@triton.jit
def megakernel(
    words,
    branches,
    weights,
    buffers,
    queue_offsets,
    queue_values,
    wait_offsets,
    wait_values,
    signal_offsets,
    signal_values,
    totals,
    counters,
    turns,
    tickets,
    quotas,
    last,
    stuck,
    scratch,
    before,
    times,
    SHARING: tl.constexpr,
    SPINS: tl.constexpr,
    TIMED: tl.constexpr,
):
    """Take the instructions of a queue in turn until `last` steps are done or a wait is not met.

    `turns` holds the place of each worker in its queue, so that another launch can go on, and
    `quotas` the number of instructions that it may take in this launch. `times` receives when
    each instruction was taken, became ready and was done.
    """
    worker = tl.program_id(0)
    queue = worker // SHARING
    first = tl.load(queue_offsets + queue)
    length = tl.load(queue_offsets + queue + 1) - first
    own = scratch + worker * {scratch}
    turn = tl.load(turns + worker)
    left = tl.load(quotas + worker)
    earlier = tl.load(before)
    going = (length > 0) & (left > 0)
    while {going}:
        step = turn // length
        number = tl.load(queue_values + first + turn % length)
        taken = sync.now(TIMED)
        sync.fetch(number, weights, buffers)
        branch = tl.load(branches + number)
        signals, last_signal, counter = sync.signals_of(number, signal_offsets, signal_values)
        going = sync.comes(
            number, step, earlier, wait_offsets, wait_values, totals, counters, last,
            stuck + worker, SPINS,
        )
        if going:
            row = words + number * {row}
            ready = sync.now(TIMED)
            run(branch, row, buffers, own)
            sync.record(times, number, taken, ready, sync.now(TIMED), TIMED)
{end}            sync.signal(signals, last_signal, counter, signal_values, counters)
            turn = sync.next_turn(turn, tickets + queue, SHARING)
            left -= 1
            going = left > 0
    tl.store(turns + worker, turn)
'''

_GOING = "tl.condition(going, disable_licm=True)"
"""Without this, registers hold the thread-dependent values of all branches at once. The interpreter
supports only plain conditions."""
_END = """\
            if branch == {branch}:  # {name}
                if head.all_ended(row, buffers, BATCH={batch}):
                    tl.atomic_min(last, step + 1)
"""


@dataclass(frozen=True)
class Emitted:
    """The source of a program's kernel, and its further arguments."""

    source: str
    branches: torch.Tensor
    """The branch of each instruction."""
    scratch: int
    """The fp32 values that each worker needs for itself."""


def emit(program: Program, tiles: str = TILES) -> Emitted:
    """Emit the kernel of a program. `tiles` is the package of the tile bodies."""
    refuse_formats(program, Role.CACHE, "triton")
    numbers: dict[Branch, int] = {}
    branch_numbers = []
    for instruction in program.instructions:
        branch = branch_of(program, instruction)
        branch_numbers.append(numbers.setdefault(branch, len(numbers)))
    modules = sorted({"head", "shape", "sync", *(branch.module for branch in numbers)})
    head = _HEAD.format(name=program.name, tiles=tiles, modules=", ".join(modules))
    lines = [line for branch, number in numbers.items() for line in _branch(branch, number)]
    ends = "".join(
        _END.format(branch=number, name=branch.name, batch=dict(branch.constants)["BATCH"])
        for branch, number in numbers.items()
        if branch.name == "argmax"
    )
    row, scratch = INSTRUCTIONS.words, _scratch(numbers)
    sizes = {"row": row, "scratch": scratch}
    condition = _GOING if tiles == TILES else "going"
    parts = [*lines, _TOGETHER.format(**sizes), _LOOP.format(**sizes, end=ends, going=condition)]
    taken_by = torch.tensor(branch_numbers, dtype=torch.int32)
    return Emitted(head + "\n".join(parts), taken_by, scratch)


_SCRATCH: dict[str, Callable[[dict[str, Any]], int]] = {
    **dict.fromkeys(
        (NormQkvRopeAppend.name, NormQkvRows.name),
        lambda constants: constants["LANES"] * constants["BATCH"],
    ),
    DeltaStep.name: lambda constants: 2 * constants["PLACES"] + constants["LANES"],
    NormExperts.name: lambda constants: (
        -(-constants["BATCH"] // constants["SEQUENCES"]) * constants["SEQUENCES"]
        + _items(constants)
    ),
    ExpertTerms.name: lambda constants: (
        constants["BATCH"] * constants["CHOSEN"] * constants["TILES"] * constants["ROWS"]
        + _items(constants)
    ),
}
"""The fp32 values that a worker needs for itself, by tile and as a function of its constants: those
of a head of all sequences, of the query, key and value of a token, of norms or results, or items of
experts."""


def _items(constants: dict[str, Any]) -> int:
    """Return the fp32 values that hold items: an expert and its choices, in 2 bytes each."""
    count: int = constants["ITEMS"] * (1 + constants["SEQUENCES"])
    return -(-count // 2)


def _scratch(branches: Iterable[Branch]) -> int:
    """Return the number of fp32 values that a worker needs for itself."""
    sizes = (
        _SCRATCH[branch.name](dict(branch.constants))
        for branch in branches
        if branch.name in _SCRATCH
    )
    return max(sizes, default=1)


def _branch(branch: Branch, number: int) -> list[str]:
    constants = [f"{name}={constant_text(value)}" for name, value in branch.constants]
    lines, line = [], " " * 12
    for constant in constants:
        if len(line) + len(constant) > 92:
            lines.append(line.rstrip())
            line = " " * 12
        line += constant + ", "
    return [
        f"    {'el' if number else ''}if branch == {number}:",
        f"        {branch.module}.{branch.name}(words, buffers, own, shape.{branch.name}(",
        *lines,
        line.rstrip(),
        "        ))",
    ]
