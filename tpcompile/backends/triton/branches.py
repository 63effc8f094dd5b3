"""The constants of each instruction's tile: what all instructions of a shape share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from tpcompile.errors import UnsupportedError
from tpcompile.ir.types import dtype_name
from tpcompile.vm.groups.attention import AttentionReduce, PartialAttention
from tpcompile.vm.groups.embed import Embed
from tpcompile.vm.groups.head import Argmax, NormLmHead
from tpcompile.vm.groups.mlp import NormGateUpSwiglu
from tpcompile.vm.groups.normed import Normed
from tpcompile.vm.groups.project import LinearResidual, LinearTerms
from tpcompile.vm.groups.qkv import NormQkvRopeAppend, NormQkvRows
from tpcompile.vm.groups.reduce import AllReduce
from tpcompile.vm.program import Program
from tpcompile.vm.program.instruction import NONE

Constant = bool | int | float | torch.dtype
Constants = Mapping[str, Constant]

_MOST_COLUMNS = 512
"""The columns of a tile of weights."""
_MOST_PRODUCTS = 8192
"""The products of queries and keys that a worker holds at a time."""
_MOST_VALUES = 65_536
"""The fp32 values that the registers of an SM hold."""


@dataclass(frozen=True)
class Branch:
    """A tile body with the constants of one shape."""

    module: str
    name: str
    constants: tuple[tuple[str, Constant], ...]


def branch_of(program: Program, one: Any) -> Branch:
    """Return the branch of the kernel that runs an instruction."""
    found = _TILES.get(type(one))
    if found is None:
        raise UnsupportedError(
            f"The triton backend has no kernel for {one.name}",
            where=one.label,
            hint='Compile with backend="reference" or backend="torch"',
        )
    module, constants = found
    own = constants(program, one)
    _check_size(one, own)
    return Branch(module, one.name, tuple(own.items()))


def _check_size(one: Any, constants: Constants) -> None:
    """Raise if the values of a head, or of several, do not fit in the registers of a worker."""
    extents = [int(constants.get(name, 1)) for name in ("HEADS", "PLACES", "LANES")]  # type: ignore[arg-type]
    if prod(extents) > _MOST_VALUES:
        raise UnsupportedError(
            f"The tile of {one.name} would hold more values than a worker has registers",
            where=one.label,
            got=" × ".join(f"{extent:,}" for extent in extents if extent > 1),
            expected=f"at most {_MOST_VALUES:,} values",
            hint='Choose fewer spans, or compile with backend="torch"',
        )


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


def _columns(width: int) -> dict[str, Constant]:
    return {"COLUMNS": min(_power_of_two(width), _MOST_COLUMNS)}


def _normed(at: Normed) -> dict[str, Constant]:
    return {"BATCH": at.batch, "WIDTH": at.width, "EPS": at.eps, **_columns(at.width)}


def _embed(program: Program, one: Embed) -> Constants:
    table, out = program.buffers[one.at.table], program.buffers[one.at.out]
    return {
        "BATCH": one.at.batch,
        "WIDTH": table.shape[1],
        "DTYPE": table.dtype,
        "OUT": out.dtype,
    }


def _qkv(program: Program, one: NormQkvRopeAppend | NormQkvRows) -> Constants:
    at = one.at
    return {
        **_normed(at.normed),
        "HEAD": at.width,
        "LANES": _power_of_two(at.width),
        "PART": int(at.part),
        "HEAD_NORM": at.head_norm != NONE,
        "HEAD_EPS": at.head_eps,
        "INTERLEAVED": at.interleaved,
        "BIAS": at.bias != NONE,
        "MOST_BLOCKS": at.most_blocks,
        "BLOCK": at.block,
        "DTYPE": program.buffers[at.weight].dtype,
    }


def _attention(program: Program, one: PartialAttention) -> Constants:
    at, lanes = one.at, _power_of_two(one.at.width)
    heads = _power_of_two(one.heads.extent)
    return {
        "WIDTH": at.width,
        "LANES": lanes,
        "HEADS": heads,
        "TOKENS": max(1, _MOST_PRODUCTS // (heads * lanes)),
        "SCALE": at.scale,
        "WINDOW": at.window,
        "BLOCK": at.block,
        "SPANS": at.spans,
        "MOST_BLOCKS": at.most_blocks,
        "DTYPE": program.buffers[at.q].dtype,
    }


def _attention_reduce(program: Program, one: AttentionReduce) -> Constants:
    return {
        "WIDTH": one.at.width,
        "LANES": _power_of_two(one.at.width),
        "SPANS": one.at.spans,
        "PLACES": _power_of_two(one.at.spans),
        "DTYPE": program.buffers[one.at.out].dtype,
    }


def _project(program: Program, one: LinearResidual | LinearTerms) -> dict[str, Constant]:
    at = one.at
    return {
        "BATCH": at.batch,
        "WIDTH": at.width,
        **_columns(at.width),
        "DTYPE": program.buffers[at.weight].dtype,
    }


def _residual(program: Program, one: LinearResidual) -> Constants:
    return {**_project(program, one), "BIAS": one.at.bias != NONE}


def _all_reduce(program: Program, one: AllReduce) -> Constants:
    at = one.at
    return {
        "BATCH": at.batch,
        "RANKS": at.ranks,
        "SLOTS": at.slots,
        "BIAS": at.bias != NONE,
        "RESIDUAL": at.residual != NONE,
        "DTYPE": program.buffers[at.out].dtype,
    }


def _gate_up(program: Program, one: NormGateUpSwiglu) -> Constants:
    at = one.at
    return {
        **_normed(at.normed),
        "FFN": at.ffn,
        "BIAS": at.bias != NONE,
        "DTYPE": program.buffers[at.weight].dtype,
    }


def _head(program: Program, one: NormLmHead) -> Constants:
    at = one.at
    dtype = program.buffers[at.weight].dtype
    return {**_normed(at.normed), "BIAS": at.bias != NONE, "DTYPE": dtype}


def _argmax(program: Program, one: Argmax) -> Constants:
    at = one.at
    return {
        "BATCH": at.batch,
        "RANKS": at.ranks,
        "SLOTS": at.slots,
        "PLACES": _power_of_two(at.slots),
        "MOST_STOPS": at.most_stops,
        "STOPS": _power_of_two(at.most_stops),
    }


_TILES: Mapping[type, tuple[str, Callable[[Program, Any], Constants]]] = {
    Embed: ("embed", _embed),
    NormQkvRopeAppend: ("qkv", _qkv),
    NormQkvRows: ("qkv", _qkv),
    PartialAttention: ("attention", _attention),
    AttentionReduce: ("attention", _attention_reduce),
    LinearResidual: ("project", _residual),
    LinearTerms: ("project", _project),
    AllReduce: ("reduce", _all_reduce),
    NormGateUpSwiglu: ("mlp", _gate_up),
    NormLmHead: ("head", _head),
    Argmax: ("head", _argmax),
}
"""For each instruction, the module of its tile body and the constants that the body takes."""


def constant_text(value: Constant) -> str:
    """Return a constant as Triton source."""
    if isinstance(value, torch.dtype):
        return f"tl.{_TRITON[value]}"
    return repr(value)


_TRITON = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def check_dtype(dtype: torch.dtype) -> None:
    """Raise unless the kernel can hold weights of this dtype."""
    if dtype not in _TRITON:
        raise UnsupportedError(
            "The triton backend does not support this dtype",
            got=dtype_name(dtype),
            expected=", ".join(_TRITON.values()),
        )
