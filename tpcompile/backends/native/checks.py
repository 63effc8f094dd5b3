"""Checks of a program and its table of buffers before native kernels run it.

Kernels access the memory that operands and the table of buffers give them. So the program must be
valid, and the table must describe the program's buffers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch

from tpcompile.backends.memory import StepMemory
from tpcompile.backends.native.build import has_kernel
from tpcompile.errors import UnsupportedError, UsageError
from tpcompile.ir.types import dtype_name
from tpcompile.vm.program import Buffer, Program, Role, rules
from tpcompile.vm.program.abi import MOST_DIMS, column_offsets
from tpcompile.vm.program.buffer import DType
from tpcompile.vm.program.fields import rules_of
from tpcompile.vm.program.instruction import NONE, StepInstruction


def check_kernels(program: Program, path: str) -> None:
    """Raise unless all instructions have kernels on a path, and all their values one dtype."""
    for one in program.instructions:
        if not isinstance(one, StepInstruction) or not has_kernel(path, one.opcode):
            raise UnsupportedError(
                f"The native backend has no kernel for {one.name}",
                where=one.label,
                hint='Compile with backend="reference" or backend="torch"',
            )
    _check_dtypes(program)


def _check_dtypes(program: Program) -> None:
    """Raise unless all floating-point buffers whose dtype is free have the same one."""
    found: dict[torch.dtype, str] = {}
    seen: set[tuple[int, type]] = set()
    for one in program.instructions:
        assert isinstance(one, StepInstruction)
        key = id(one.at), type(one)
        for number in _free_buffers(one, shared=key not in seen):
            buffer = program.buffers[number]
            found.setdefault(buffer.dtype, buffer.name)
        seen.add(key)
    if len(found) > 1:
        raise UnsupportedError(
            "The native backend needs one dtype for weights, cache and values",
            got=", ".join(f"{dtype_name(dtype)} in {name}" for dtype, name in found.items()),
            hint='Compile with one dtype, or with backend="torch"',
        )


def _free_buffers(one: Any, shared: bool) -> Iterator[int]:
    """Yield the buffers of own and shared operands whose rule leaves the dtype open."""
    kind: Any = type(one)
    for path, _, rule in rules_of(kind):
        if path.startswith("at.") and not shared:
            continue
        if isinstance(rule, rules.Chosen):
            rule = rule.rules[getattr(one.at, rule.operand)]
        number = attrgetter(path)(one)
        if isinstance(rule, rules.Held) and isinstance(rule.dtype, str) and number != NONE:
            yield number


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
