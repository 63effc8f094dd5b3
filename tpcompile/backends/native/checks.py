"""Checks of a program and its table of buffers before native kernels run it.

Kernels access the memory that operands and the table of buffers give them. So the program must be
valid, and the table must describe the program's buffers.
"""

from __future__ import annotations

import math
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn

import torch

from tpcompile.backends.memory import StepMemory
from tpcompile.backends.native.build import has_kernel
from tpcompile.errors import UnsupportedError, UsageError
from tpcompile.ir.dtypes import DType, dtype_name
from tpcompile.vm.program import Buffer, Program, Role, rules
from tpcompile.vm.program.abi import MOST_DIMS, column_offsets
from tpcompile.vm.program.fields import rules_of
from tpcompile.vm.program.instruction import NONE, StepInstruction


class Dtypes(NamedTuple):
    """The dtypes of an instruction's floating-point operands, by what they hold; None for none."""

    values: torch.dtype | None
    weights: torch.dtype | None
    vectors: torch.dtype | None
    """The dtype of norms and biases."""
    cache: torch.dtype | None

    def __str__(self) -> str:
        names = ("values", "weights", "norms and biases", "cache")
        pairs = zip(self, names, strict=True)
        first, *others = [f"{dtype_name(dtype)} {name}" for dtype, name in pairs if dtype]
        return f"{first} with {', '.join(others)}" if others else first


def check_kernels(program: Program, path: str) -> None:
    """Raise unless a path has kernels for all instructions with the dtypes of their operands."""
    shared: dict[tuple[int, type], Holders] = {}
    for one in program.instructions:
        if not isinstance(one, StepInstruction) or not has_kernel(path, one.opcode):
            _refuse_kernel(one, one.name)
        key = id(one.at), type(one)
        if key not in shared:
            shared[key] = _holders(one, program, shared=True)
        dtypes = _dtypes(shared[key], _holders(one, program, shared=False))
        if not has_kernel(path, one.opcode, *dtypes):
            _refuse_kernel(one, str(dtypes))


def _refuse_kernel(one: Any, subject: str) -> NoReturn:
    raise UnsupportedError(
        f"The native backend has no kernel for {subject}",
        where=one.label,
        hint='Compile with backend="reference" or backend="torch"',
    )


Holders = tuple[tuple[str, torch.dtype, str], ...]
"""For each of some buffers, the field of `Dtypes` that it belongs to, its dtype and its name."""


def _holders(one: Any, program: Program, shared: bool) -> Holders:
    """Describe the buffers of own or of shared operands whose rule leaves the dtype open."""
    found: list[tuple[str, torch.dtype, str]] = []
    kind: Any = type(one)
    for path, _, rule in rules_of(kind):
        if path.startswith("at.") != shared:
            continue
        if isinstance(rule, rules.Chosen):
            rule = rule.rules[getattr(one.at, rule.operand)]
        if isinstance(rule, rules.Held) and isinstance(rule.dtype, str):
            number = attrgetter(path)(one)
            if number != NONE:
                buffer = program.buffers[number]
                found.append((_held_in(rule), buffer.dtype, buffer.name))
    return tuple(found)


def _held_in(rule: rules.Held) -> str:
    """Return the field of `Dtypes` for a buffer with this rule."""
    if rule.role == Role.CACHE:
        return "cache"
    if rule.role == Role.WEIGHT:
        return "vectors" if len(rule.shape) == 1 else "weights"
    return "values"


@cache
def _dtypes(shared: Holders, own: Holders) -> Dtypes:
    """Return the dtypes of an instruction; raise if operands of one kind have two."""
    found: dict[str, dict[torch.dtype, str]] = {name: {} for name in Dtypes._fields}
    for field, dtype, name in (*shared, *own):
        found[field].setdefault(dtype, name)
    for field, dtypes in found.items():
        if len(dtypes) > 1:
            subject = "norms and biases" if field == "vectors" else field
            raise UnsupportedError(
                f"The native backend needs one dtype for the {subject} of an instruction",
                got=", ".join(f"{dtype_name(dtype)} in {name}" for dtype, name in dtypes.items()),
                hint='Compile with one dtype, or with backend="torch"',
            )
    return Dtypes(*(next(iter(dtypes), None) for dtypes in found.values()))


def check_table(table: torch.Tensor, memory: StepMemory) -> None:
    """Raise unless each row of the table describes the buffer of the program, and its tensor.

    Buffers of ranks that are not here have no memory, and no instruction here accesses them.
    """
    buffers = memory.program.buffers
    if len(table) != len(buffers):
        _refuse_table("", f"{len(table)} rows", f"{len(buffers)} rows, one per buffer")
    offsets = column_offsets()
    for row, buffer, tensor in zip(table.tolist(), buffers, memory.tensors, strict=True):
        if tensor.numel() == 0 and buffer.rank not in memory.ranks:
            continue
        wanted = _row(buffer, tensor, memory.block)
        for name, offset in offsets.items():
            width = len(wanted[name])
            got = row[offset : offset + width]
            if name == "strides":  # never used in an empty tensor or a dimension of one element
                got = [
                    stride if extent > 1 and tensor.numel() else known
                    for stride, extent, known in zip(
                        got, wanted["shape"], wanted[name], strict=True
                    )
                ]
            if got != wanted[name]:
                where = f"{name} of the buffer {buffer.name} of rank {buffer.rank}"
                _refuse_table(where, str(got), str(wanted[name]))


def _row(buffer: Buffer, tensor: torch.Tensor, block: int) -> dict[str, list[int]]:
    """Return the columns that describe a buffer. A cache may have any number of slots."""
    cache = buffer.role == Role.CACHE
    extents = list(buffer.extents)
    if cache:
        extents[2] = tensor.shape[2]
    if tensor.dtype != buffer.dtype or tensor.numel() != math.prod(extents):
        where = f"the buffer {buffer.name} of rank {buffer.rank}"
        got = f"{list(tensor.shape)} in {tensor.dtype}"
        _refuse_table(where, got, f"a tensor {extents} in {buffer.dtype}")
    rest = [0] * (MOST_DIMS - len(extents))
    return {
        "address": [tensor.data_ptr()],
        "role": [buffer.role],
        "rank": [buffer.rank],
        "dtype": [DType.of(buffer.dtype)],
        "block": [block if cache else 0],
        "dims": [len(extents)],
        "shape": extents + rest,
        "strides": [*buffer.strides(extents), *rest],
    }


def _refuse_table(where: str, got: str, expected: str) -> None:
    raise UsageError(
        "The table of buffers must describe the buffers of the program",
        where=where,
        got=got,
        expected=expected,
    )


def check_times(times: torch.Tensor | None, program: Program) -> None:
    """Raise unless the tensor can receive three times for each instruction."""
    shape = (len(program.instructions), 3)
    if times is None or (
        (tuple(times.shape), times.dtype) == (shape, torch.int64) and times.is_contiguous()
    ):
        return
    raise UsageError(
        "The times of a launch must be a contiguous int64 tensor with three per instruction",
        got=f"{list(times.shape)} in {times.dtype}",
        expected=f"{list(shape)} in torch.int64",
    )
