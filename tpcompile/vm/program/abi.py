"""The binary interface between programs and executors: offsets and constants by name.

A program reaches an executor as rows of int32 words (`encoding.py`) and a table of buffers. The
offsets of operands and the names of opcodes and enumerations are derived from the instructions'
dataclasses. C executors get a header, Triton kernels and Python get constants, and the
documentation prints the same tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from typing import Any

import torch

from tpcompile.errors import UnsupportedError, UsageError
from tpcompile.ir.dtypes import DType
from tpcompile.ir.format import (
    HIGH,
    MINIMUM,
    SCALE,
    SUPER_MINIMUM,
    SUPER_SCALE,
    ZERO_POINT,
    Kind,
    Scales,
)
from tpcompile.vm.program.buffer import Buffer, Role
from tpcompile.vm.program.fields import flat_fields, operands_of
from tpcompile.vm.program.instruction import Range, StepInstruction, word_count
from tpcompile.vm.program.instruction_set import INSTRUCTIONS
from tpcompile.vm.program.weight import Weight

VERSION = 7
"""Incremented whenever a word, a column or a number changes its meaning."""


MOST_DIMS = 5
"""The maximum number of dimensions of a buffer in memory."""

COLUMNS = {
    "address": 1,
    "role": 1,
    "rank": 1,
    "dtype": 1,
    "block": 1,
    "dims": 1,
    "shape": MOST_DIMS,
    "strides": MOST_DIMS,
    "format": 1,
    "first": 1,
    "high": 1,
    "scales": 1,
    "offsets": 1,
    "minima": 1,
    "super_scales": 1,
    "super_minima": 1,
}
"""The columns of the table of buffers, with their widths. Each buffer has one row of int64.

`block` is the tokens per block of the KV cache, and 0 for other buffers. Strides count elements.
A weight of several components has the shape of the weight, and the address, dtype and strides of
its values; `first` is its first column. The last columns are addresses of further components, or 0;
`high` has the highest bits of integers of 5 and 6 bits. A cache in a format has the shape and the
dtype of its values, and the strides of its rows, in which the scale follows the values.
"""
PARTS = {
    "high": HIGH,
    "scales": SCALE,
    "offsets": ZERO_POINT,
    "minima": MINIMUM,
    "super_scales": SUPER_SCALE,
    "super_minima": SUPER_MINIMUM,
}
"""The suffix of the component of a weight whose address each of these columns has."""


@dataclass(frozen=True)
class Field:
    """An operand in the row of an instruction."""

    name: str
    """The nested operand `normed.eps` is named `normed_eps`. An instruction's own operand is named
    `own_leaves` if a shared operand is named `leaves`."""
    offset: int
    """The index of its first word. Word 0 is the opcode."""
    kind: type

    @property
    def words(self) -> int:
        return word_count(self.kind)


def layout(kind: Any) -> tuple[Field, ...]:
    """Return the operands of an instruction in the order of their words."""
    shared = dict(flat_fields(operands_of(kind)))
    unshared = [(path, inner) for path, inner in flat_fields(kind) if not path.startswith("at.")]
    names = [*shared.items(), *((f"own_{n}" if n in shared else n, inner) for n, inner in unshared)]
    operands: list[Field] = []
    offset = 1
    for name, inner in names:
        operands.append(Field(name.replace(".", "_"), offset, inner))
        offset += operands[-1].words
    return tuple(operands)


def constants() -> dict[str, int]:
    """Return every constant of the interface by name, for Python and for Triton kernels."""
    values = {"ABI_VERSION": VERSION, "ROW_WORDS": INSTRUCTIONS.words}
    for kind in INSTRUCTIONS.values():
        values[f"OP_{kind.name.upper()}"] = kind.opcode
    for enum in enumerations().values():
        values |= {f"{_upper(enum.__name__)}_{member.name}": int(member) for member in enum}
    for name, offset in column_offsets().items():
        values[f"BUFFER_{name.upper()}"] = offset
    for kind in INSTRUCTIONS.values():
        for field in layout(kind):
            values[f"{kind.name.upper()}_{field.name.upper()}"] = field.offset
    return values


def column_offsets() -> Mapping[str, int]:
    """Return the offset of each column in a row of the table of buffers."""
    return dict(zip(COLUMNS, accumulate(COLUMNS.values(), initial=0), strict=False))


def columns_of(row: Sequence[int]) -> dict[str, list[int]]:
    """Return the columns of a row of the table of buffers, by name."""
    offsets = column_offsets()
    return {name: list(row[offsets[name] : offsets[name] + COLUMNS[name]]) for name in COLUMNS}


def buffer_row(buffer: Buffer, memory: torch.Tensor | Weight, block: int) -> list[int]:
    """Return the table row of a buffer that is stored in a tensor, or in those of a weight."""
    tensor = memory.values if isinstance(memory, Weight) else memory
    if tensor.dim() > MOST_DIMS:
        raise UnsupportedError(
            f"The buffer {buffer.name} has too many dimensions",
            got=str(list(tensor.shape)),
            expected=f"at most {MOST_DIMS} dimensions",
        )
    addresses = {"address": tensor.data_ptr()}
    if isinstance(memory, Weight):
        parts = memory.parts
        addresses |= {name: parts[part].data_ptr() for name, part in PARTS.items() if part in parts}
    return row_of(buffer, addresses, list(memory.shape), list(tensor.stride()), block)


def row_of(
    buffer: Buffer,
    addresses: Mapping[str, int],
    shape: Sequence[int],
    strides: Sequence[int],
    block: int,
) -> list[int]:
    """Return the table row of a buffer, given what its memory determines."""
    dtype = DType.of(buffer.dtype)
    if buffer.storage is not None and len(shape) == len(buffer.storage):
        shape = (*shape[:-1], buffer.storage[-1])
    columns: Mapping[str, list[int]] = {
        **{name: [addresses.get(name, 0)] for name in ("address", *PARTS)},
        "role": [buffer.role],
        "rank": [buffer.rank],
        "dtype": [dtype],
        "block": [block if buffer.role == Role.CACHE else 0],
        "dims": [len(shape)],
        "shape": [*shape, *[0] * (MOST_DIMS - len(shape))],
        "strides": [*strides, *[0] * (MOST_DIMS - len(strides))],
        "format": [dtype if buffer.format is None else buffer.format],
        "first": [buffer.first],
    }
    return [int(number) for name in COLUMNS for number in columns[name]]


def enumerations(
    kinds: Iterable[type[StepInstruction]] | None = None,
) -> Mapping[str, type[IntEnum]]:
    """Return the enumerations in operands, in formats and in the table of buffers, by name.

    The operands are those of some instructions, by default of all.
    """
    enums: dict[str, type[IntEnum]] = {
        "DType": DType,
        "Kind": Kind,
        "Scales": Scales,
        "Role": Role,
    }
    for kind in INSTRUCTIONS.values() if kinds is None else kinds:
        for field in layout(kind):
            if issubclass(field.kind, IntEnum):
                enums[field.kind.__name__] = field.kind
    return enums


def check_version(version: int, executor: str) -> None:
    """Raise a UsageError if an executor was built for another version of the interface."""
    if version != VERSION:
        raise UsageError(
            f"The executor {executor} was built for another version of the program's words",
            got=f"version {version}",
            expected=f"version {VERSION}",
            hint="Build the executor again",
        )


def c_header() -> str:
    """Return the interface as a C header: enumerations, and a struct for each instruction.

    Instructions of other packages are left out, so that one build serves with and without them.
    """
    kinds = INSTRUCTIONS.built_in()
    lines = [
        "/* Generated by tpcompile.vm.program.abi; do not edit. */",
        "#ifndef TPC_ABI_H",
        "#define TPC_ABI_H",
        "#include <stdint.h>",
        "",
        f"#define TPC_ABI_VERSION {VERSION}",
        f"#define TPC_ROW_WORDS {INSTRUCTIONS.words}",
        "#define TPC_NONE (-1)",
        "",
        "typedef struct { int32_t start, stop; } tpc_range;",
        "",
        *_c_enum("opcode", "OP", {k.name.upper(): k.opcode for k in kinds}),
    ]
    for enum in enumerations(kinds).values():
        name = _upper(enum.__name__)
        lines += _c_enum(name.lower(), name, {member.name: int(member) for member in enum})
    lines += ["typedef struct {"]
    for name, width in COLUMNS.items():
        lines.append(f"  int64_t {name}{f'[{width}]' if width > 1 else ''};")
    lines += ["} tpc_buffer;", ""]
    for kind in kinds:
        lines += ["typedef struct {", "  int32_t opcode;"]
        lines += [f"  {_c_type(field.kind)} {field.name};" for field in layout(kind)]
        lines += [f"}} tpc_{kind.name};", ""]
    return "\n".join([*lines, "#endif", ""])


def _c_enum(name: str, prefix: str, values: Mapping[str, int]) -> list[str]:
    members = ", ".join(f"TPC_{prefix}_{member} = {value}" for member, value in values.items())
    return [f"enum tpc_{name} {{ {members} }};", ""]


def _c_type(kind: type) -> str:
    return {float: "float", Range: "tpc_range"}.get(kind, "int32_t")


def _upper(name: str) -> str:
    """Convert `DType` to DTYPE and `SpanKind` to SPAN_KIND."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper()
