"""The constants of each instruction's tile, which all instructions of a shape share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from math import prod
from operator import attrgetter
from typing import Any

import torch

from tpcompile.backends.triton import shapes
from tpcompile.backends.triton.formats import check_format
from tpcompile.backends.triton.shapes import power_of_two
from tpcompile.errors import UnsupportedError
from tpcompile.ir.dtypes import dtype_name
from tpcompile.ir.format import Format
from tpcompile.ir.ops.activation import Activation
from tpcompile.vm.groups.attention import AttentionReduce, PartialAttention
from tpcompile.vm.groups.delta import DeltaStep
from tpcompile.vm.groups.embed import Embed
from tpcompile.vm.groups.experts import ExpertTerms, NormExperts, SharedTerms
from tpcompile.vm.groups.head import Argmax, NormLmHead
from tpcompile.vm.groups.mlp import NormGateUpSwiglu, NormUpActivation
from tpcompile.vm.groups.project import LinearResidual, LinearTerms
from tpcompile.vm.groups.qkv import NormQkvRopeAppend, NormQkvRows
from tpcompile.vm.groups.reduce import AllReduce
from tpcompile.vm.groups.router import TopExperts
from tpcompile.vm.groups.rows import NormRows
from tpcompile.vm.program import Program
from tpcompile.vm.program.fields import rules_of
from tpcompile.vm.program.instruction import NONE, StepInstruction
from tpcompile.vm.program.rules import BufferRule, Chosen

Constant = bool | int | float | torch.dtype
Constants = Mapping[str, Constant]
Source = Callable[[Program, Any], Constant]
"""A constant as a function of the program and an instruction."""

_MOST_KEYS = 16_384
"""The elements of keys that a worker holds at a time; values have as many."""
_MOST_VALUES = 65_536
"""The fp32 values that the registers of an SM hold."""
_MOST_CHOICES = 32_767
"""The experts that all sequences choose. A rank holds fewer."""


@dataclass(frozen=True)
class Branch:
    """A tile body with the constants of one shape."""

    module: str
    name: str
    constants: tuple[tuple[str, Constant], ...]


def branch_of(program: Program, instruction: Any) -> Branch:
    """Return the branch of the kernel that runs an instruction."""
    kind: Any = type(instruction)
    if kind not in _TILES:
        raise UnsupportedError(
            f"The triton backend has no kernel for {instruction.name}",
            where=instruction.label,
            hint='Compile with backend="reference" or backend="torch"',
        )
    check_format(program, instruction)
    module, _ = _TILES[kind]
    constants = {name: constant(program, instruction) for name, constant in _constants(kind)}
    _check_size(instruction, constants)
    return Branch(module, instruction.name, tuple(constants.items()))


@cache
def _constants(kind: Any) -> list[tuple[str, Source]]:
    """Return the sources of the constants of a tile body."""
    rules = {path: rule for path, _, rule in rules_of(kind)}
    return [
        (name, _constant(f"at.{operand}", rules.get(f"at.{operand}")))
        if isinstance(operand, str)
        else (name, operand)
        for name, operand in _TILES[kind][1].items()
    ]


def _constant(path: str, rule: Any) -> Source:
    """Return the constant of a shared operand.

    It is a number, the dtype of a buffer, or whether an optional buffer is present.
    """
    operand = attrgetter(path)
    choices = rule.rules.values() if isinstance(rule, Chosen) else [rule]
    held = [choice for choice in choices if isinstance(choice, BufferRule)]
    if not held:
        return lambda program, instruction: operand(instruction)
    if len(held) < len(choices) or held[0].optional:
        return lambda program, instruction: operand(instruction) != NONE
    return lambda program, instruction: program.buffers[operand(instruction)].dtype


def _check_size(instruction: Any, constants: Constants) -> None:
    """Raise if the values exceed a worker's registers, or the choices of experts 2 bytes."""
    extents = [int(constants.get(name, 1)) for name in ("HEADS", "PLACES", "LANES")]  # type: ignore[arg-type]
    advice = "Choose fewer spans, or compile" if "SPANS" in constants else "Compile"
    if prod(extents) > _MOST_VALUES:
        raise UnsupportedError(
            f"The tile of {instruction.name} would hold more values than a worker has registers",
            where=instruction.label,
            got=" × ".join(f"{extent:,}" for extent in extents if extent > 1),
            expected=f"at most {_MOST_VALUES:,} values",
            hint=f'{advice} with backend="torch"',
        )
    choices = int(constants.get("BATCH", 1)) * int(constants.get("CHOSEN", 1))  # type: ignore[arg-type]
    if "ITEMS" in constants and choices > _MOST_CHOICES:
        raise UnsupportedError(
            f"The tile of {instruction.name} numbers the choices of all sequences in 2 bytes",
            where=instruction.label,
            got=f"{choices:,}",
            expected=f"at most {_MOST_CHOICES:,} choices",
            hint='Choose a smaller batch, or compile with backend="torch"',
        )


def _padded(path: str) -> Source:
    """Return a shared operand, rounded up to a power of two."""
    operand = attrgetter(f"at.{path}")
    return lambda program, instruction: power_of_two(operand(instruction))


def _same_names(*names: str) -> dict[str, str]:
    """Return constants that are named like their operands."""
    return {name.upper(): name for name in names}


def _table_width(program: Program, instruction: Embed) -> int:
    return program.buffers[instruction.at.table].shape[1]


def _table_dtype(program: Program, instruction: Embed) -> torch.dtype:
    """Return the dtype of the numbers of a table, which are scaled in fp32."""
    return (
        program.buffers[instruction.at.table].dtype
        if instruction.at.format.plain
        else torch.float32
    )


def _heads(program: Program, instruction: PartialAttention) -> int:
    return power_of_two(instruction.heads.extent)


def _tokens(program: Program, instruction: PartialAttention) -> int:
    return max(1, _MOST_KEYS // power_of_two(instruction.at.width))


def _always(value: Constant) -> Source:
    """Return a constant that is the same in every branch."""
    return lambda program, instruction: value


_Operands = Mapping[str, str | Source]

_PRODUCT: _Operands = {
    "SEQUENCES": shapes.sequences,
    "TILES": shapes.tiles,
    "ROWS": shapes.rows,
    "COLUMNS": shapes.columns,
    "STAGES": shapes.stages,
}
_NORMED: _Operands = {
    "BATCH": "normed.batch",
    **_PRODUCT,
    "WIDTH": "normed.width",
    "EPS": "normed.eps",
    "ZERO_CENTERED": "normed.zero_centered",
}
_OF_NORMED: _Operands = {"DTYPE": "normed.x", "FORMAT": "format"}
_OF_X: _Operands = {"DTYPE": "x", "FORMAT": "format"}
_EMBED: _Operands = {
    "BATCH": "batch",
    "TILES": _always(1),
    "ROWS": _always(1),
    "COLUMNS": _always(256),
    "WIDTH": _table_width,
    "DTYPE": _table_dtype,
    "OUT": "out",
    "FORMAT": "format",
}
_QKV: _Operands = {
    **_NORMED,
    "HEAD": "width",
    "LANES": _padded("width"),
    **_same_names("rotated", "part", "head_norm", "head_eps", "interleaved", "bias"),
    **_same_names("most_blocks", "block"),
    **_OF_NORMED,
}
_ATTENTION: _Operands = {
    "WIDTH": "width",
    "LANES": _padded("width"),
    "HEADS": _heads,
    "TOKENS": _tokens,
    **_same_names("scale", "window", "block", "spans", "most_blocks"),
    "DTYPE": "q",
}
_MERGE: _Operands = {
    "WIDTH": "width",
    "LANES": _padded("width"),
    "SPANS": "spans",
    "PLACES": _padded("spans"),
    "GATE": "gate",
    "DTYPE": "out",
}
_GATE_UP: _Operands = {**_NORMED, **_same_names("ffn", "bias"), **_OF_NORMED}
_LINEAR: _Operands = {**_NORMED, "BIAS": "bias", **_OF_NORMED}
_DELTA: _Operands = {
    "KEY": "key",
    "PLACES": _padded("key"),
    "VALUE": "value",
    "LANES": _padded("value"),
    **_same_names("taps", "eps", "bias"),
    "DTYPE": "projected",
}
_TOP: _Operands = {
    "EXPERTS": "experts",
    "PLACES": _padded("experts"),
    "CHOSEN": "chosen",
    "CHOICES": _padded("chosen"),
    "NORMALIZED": "normalized",
    "DTYPE": "logits",
}
_MIXTURE: _Operands = {
    **_same_names("chosen", "extent", "held"),
    "PLACES": _padded("held"),
    "ITEMS": shapes.items,
}
_PROJECT: _Operands = {**_same_names("batch"), **_PRODUCT, "WIDTH": "width", **_OF_X}
_ARGMAX: _Operands = {
    **_same_names("batch", "ranks", "slots"),
    "PLACES": _padded("slots"),
    "MOST_STOPS": "most_stops",
    "STOPS": _padded("most_stops"),
}
_TILES: Mapping[type[StepInstruction], tuple[str, _Operands]] = {
    Embed: ("embed", _EMBED),
    NormQkvRopeAppend: ("qkv", _QKV),
    NormQkvRows: ("qkv", _QKV),
    PartialAttention: ("attention", _ATTENTION),
    AttentionReduce: ("attention", _MERGE),
    LinearResidual: ("project", {**_PROJECT, "BIAS": "bias"}),
    LinearTerms: ("project", _PROJECT),
    AllReduce: (
        "reduce",
        {**_same_names("batch", "ranks", "slots", "bias", "residual"), "DTYPE": "out"},
    ),
    NormGateUpSwiglu: (
        "mlp",
        {**_GATE_UP, "SIDES": _always(2), "ACTIVATION": _always(Activation.SILU)},
    ),
    NormUpActivation: ("mlp", {**_GATE_UP, **_same_names("sides", "activation")}),
    NormRows: ("rows", _LINEAR),
    DeltaStep: ("delta", _DELTA),
    TopExperts: ("router", _TOP),
    NormExperts: ("experts", {**_NORMED, **_MIXTURE, **_OF_NORMED}),
    ExpertTerms: ("experts", {**_PROJECT, **_MIXTURE}),
    SharedTerms: ("experts", _PROJECT),
    NormLmHead: ("head", _LINEAR),
    Argmax: ("head", _ARGMAX),
}
"""For each instruction, the module of its tile body, and the source of each constant that the body
takes: a shared operand, or a function of the program and the instruction."""
CONSTANTS = {kind.name: tuple(operands) for kind, (_, operands) in _TILES.items()}
"""The names of the constants of each instruction's tile body."""


def constant_text(value: Constant) -> str:
    """Return a constant as Triton source."""
    if isinstance(value, torch.dtype):
        return f"tl.{_TRITON[value]}"
    return repr(int(value) if isinstance(value, IntEnum | Format) else value)


_TRITON = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def check_dtype(dtype: torch.dtype) -> None:
    """Raise unless the kernel can hold weights of this dtype."""
    if dtype not in _TRITON:
        raise UnsupportedError(
            "The triton backend does not support this dtype",
            got=dtype_name(dtype),
            expected=", ".join(_TRITON.values()),
        )
