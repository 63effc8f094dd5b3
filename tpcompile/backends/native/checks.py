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
from tpcompile.ir.format import Format
from tpcompile.vm.program import Buffer, Program, Role, rules
from tpcompile.vm.program.abi import buffer_row, columns_of, row_of
from tpcompile.vm.program.fields import rules_of
from tpcompile.vm.program.instruction import NONE, StepInstruction
from tpcompile.vm.program.weight import Weight


class Dtypes(NamedTuple):
    """The formats of an instruction's floating-point operands by kind; None for absent operands."""

    values: Format | None
    weights: Format | None
    vectors: Format | None
    """The dtype of norms and biases."""
    cache: Format | None

    def __str__(self) -> str:
        names = ("values", "weights", "norms and biases", "cache")
        pairs = zip(self, names, strict=True)
        first, *remaining = [f"{stored} {name}" for stored, name in pairs if stored]
        if self.weights is not None and self.weights.rounds:
            first += " that are rounded to int8"
        return f"{first} with {', '.join(remaining)}" if remaining else first


def dtype_of(program: Program) -> torch.dtype:
    """Return the dtype of a program's values, for which kernels are built."""
    return program.buffers[program.one_per_rank(Role.LOGITS)[0]].dtype


def check_kernels(program: Program, path: str) -> None:
    """Raise unless a path has kernels for all instructions with the dtypes of their operands.

    Two dtypes of one kind in an instruction are refused first: the message names their buffers.
    """
    shared: dict[tuple[int, type], Holders] = {}
    typed: list[tuple[StepInstruction, Dtypes]] = []
    for instruction in program.instructions:
        if not isinstance(instruction, StepInstruction):
            _refuse_kernel(instruction, instruction.name)
        key = id(instruction.at), type(instruction)
        if key not in shared:
            shared[key] = _holders(instruction, program, shared=True)
        typed.append(
            (instruction, _dtypes(shared[key], _holders(instruction, program, shared=False)))
        )
    dtype = dtype_of(program)
    for instruction, dtypes in typed:
        if not has_kernel(path, dtype, instruction.opcode):
            _refuse_kernel(instruction, instruction.name)
        if not has_kernel(path, dtype, instruction.opcode, *dtypes):
            values = dtypes.values or Format.of(dtype)
            _refuse_kernel(instruction, str(dtypes._replace(values=values)))


def _refuse_kernel(instruction: Any, subject: str) -> NoReturn:
    raise UnsupportedError(
        f"The native backend has no kernel for {subject}",
        where=instruction.label,
        hint='Compile with backend="reference" or backend="torch"',
    )


Holders = tuple[tuple[str, Format, str], ...]
"""Buffers: the field of `Dtypes` that each belongs to, its format and its name."""


def _holders(instruction: Any, program: Program, shared: bool) -> Holders:
    """Describe the buffers of own or of shared operands whose rule leaves the dtype open."""
    holders: list[tuple[str, Format, str]] = []
    kind: Any = type(instruction)
    for path, _, rule in rules_of(kind):
        if path.startswith("at.") != shared:
            continue
        if isinstance(rule, rules.Chosen):
            rule = rule.rules[getattr(instruction.at, rule.operand)]
        if isinstance(rule, rules.BufferRule) and isinstance(rule.dtype, str):
            number = attrgetter(path)(instruction)
            if number != NONE:
                buffer = program.buffers[number]
                holders.append((_held_in(rule), buffer.stored, buffer.name))
    return tuple(holders)


def _held_in(rule: rules.BufferRule) -> str:
    """Return the field of `Dtypes` for a buffer with this rule."""
    if rule.role == Role.CACHE:
        return "cache"
    if rule.role == Role.WEIGHT:
        return "vectors" if len(rule.shape) == 1 else "weights"
    return "values"


@cache
def _dtypes(shared: Holders, unshared: Holders) -> Dtypes:
    """Return the dtypes of an instruction; raise if operands of one kind have two."""
    buffer_names: dict[str, dict[Format, str]] = {name: {} for name in Dtypes._fields}
    for field, stored, name in (*shared, *unshared):
        buffer_names[field].setdefault(stored, name)
    for field, dtypes in buffer_names.items():
        if len(dtypes) > 1:
            subject = "norms and biases" if field == "vectors" else field
            raise UnsupportedError(
                f"The native backend needs one dtype for the {subject} of an instruction",
                got=", ".join(f"{stored} in {name}" for stored, name in dtypes.items()),
                hint='Compile with one dtype, or with backend="torch"',
            )
    return Dtypes(*(next(iter(dtypes), None) for dtypes in buffer_names.values()))


def check_table(table: torch.Tensor, memory: StepMemory) -> None:
    """Raise unless each row of the table describes the buffer of the program, and its tensor.

    Buffers of ranks that are not here have no memory, and no instruction here accesses them.
    """
    buffers = memory.program.buffers
    if len(table) != len(buffers):
        _refuse_table("", f"{len(table)} rows", f"{len(buffers)} rows, one per buffer")
    for row, buffer, tensor in zip(table.tolist(), buffers, memory.tensors, strict=True):
        if (
            isinstance(tensor, torch.Tensor)
            and not tensor.numel()
            and buffer.rank not in memory.ranks
        ):
            continue
        wanted = columns_of(_row(buffer, tensor, memory.block))
        for name, got in columns_of(row).items():
            if name == "strides":  # never used in an empty tensor or a dimension of one element
                used = 0 not in wanted["shape"][: wanted["dims"][0]]
                got = [
                    stride if used and extent > 1 else known
                    for stride, extent, known in zip(
                        got, wanted["shape"], wanted[name], strict=True
                    )
                ]
            if got != wanted[name]:
                where = f"{name} of the buffer {buffer.name} of rank {buffer.rank}"
                _refuse_table(where, str(got), str(wanted[name]))


def _row(buffer: Buffer, tensor: torch.Tensor | Weight, block: int) -> list[int]:
    """Return the row of a buffer by its declaration.

    A cache may have any number of slots, and there may be any number of states.
    """
    if isinstance(tensor, Weight):  # whose tensors the memory has checked
        return buffer_row(buffer, tensor, block)
    extents = list(buffer.extents)
    if buffer.role == Role.CACHE:
        extents[2] = tensor.shape[2]
    elif buffer.storage is not None:
        extents[1] = tensor.shape[1]
    if tensor.dtype != buffer.dtype or tensor.numel() != math.prod(extents):
        where = f"the buffer {buffer.name} of rank {buffer.rank}"
        got = f"{list(tensor.shape)} in {tensor.dtype}"
        _refuse_table(where, got, f"a tensor {extents} in {buffer.dtype}")
    address = {"address": tensor.data_ptr()}
    return row_of(buffer, address, extents, buffer.strides(extents), block)


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
