"""Layouts of weights with several components in checkpoints, and refusals of other layouts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn

from tpcompile.checkpoint_files import names_of_module
from tpcompile.errors import UnsupportedError
from tpcompile.frontend.linears import head_of, model_linears
from tpcompile.ir.codec import Codec, Known
from tpcompile.ir.format import MOST_COLUMNS, Format, Kind
from tpcompile.json_files import shortened

ORIGINAL = (
    "Use the original checkpoint, in bfloat16 or float32. tpcompile quantizes it while it is "
    'loaded with weights="int8" or weights="int4"'
)
"""The hint for a checkpoint whose weights are not read."""


def _nothing(weight: tuple[int, ...], columns: int) -> dict[str, Known]:
    return {}


@dataclass(frozen=True)
class Layout:
    """The layout in which a checkpoint stores quantized weights."""

    kind: Kind
    """The kind of the values in memory."""
    codecs: Mapping[str, Codec] = field(default_factory=dict)
    """The codecs of components that are stored differently than in memory, by suffix."""
    known: Callable[[tuple[int, ...], int], Mapping[str, Known]] = _nothing
    """Further tensors of a module, given the shape of its weight and the columns per group.

    They repeat what the configuration says."""


@dataclass(frozen=True)
class StoredWeight:
    """The layout of a weight in the checkpoint."""

    format: Format
    layout: Layout


class UnreadWeightsError(UnsupportedError):
    """Weights that the checkpoint stores in a way that tpcompile does not read."""


Supported = Mapping[str, tuple[Any, ...]]
"""Properties of a configuration, and their supported values."""


def require_all(supported: Supported, properties: Mapping[str, Any], prefix: str = "") -> None:
    """Raise for the first property with another value; `prefix` comes before its name."""
    for name, allowed in supported.items():
        if properties.get(name) not in allowed:
            refuse(prefix + name, properties.get(name), " or ".join(map(repr, allowed)))


def columns_of(group_size: Any, whole: int) -> int:
    """Return the columns per group; raise unless they divide those of the weight."""
    valid = type(group_size) is int and 0 < group_size <= MOST_COLUMNS
    if not valid or whole % group_size:
        refuse("group_size", group_size, f"a number that divides {whole} columns")
    return int(group_size)


def block_of(name: str, value: Any) -> tuple[int, int]:
    """Return the rows and columns that share a scale, given by a property of the configuration."""
    sizes = value if isinstance(value, list | tuple) else ()
    valid = len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes)
    if not valid or sizes[1] > MOST_COLUMNS:
        refuse(name, value, f"the rows and the columns of a block, at most {MOST_COLUMNS}")
    rows, columns = sizes
    return rows, columns


def names_of_modules(name: str, value: Any) -> list[str]:
    """Return the names of modules that a property of the configuration has."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        refuse(name, value, "names of modules")
    return value


def check_pattern(name: str, pattern: str, value: str) -> None:
    """Raise unless a property of the configuration gives a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        refuse(name, value, f"a regular expression ({error})")


def refuse(name: str, value: Any, expected: str) -> NoReturn:
    """Raise the error for a property of the configuration."""
    raise UnreadWeightsError(
        "tpcompile cannot read weights that are quantized like this",
        where=f"quantization_config.{name}".rstrip("."),
        got=shortened(repr(value)),
        expected=expected,
        hint=ORIGINAL,
    )


def linears_in_groups(
    module: nn.Module,
    group_size: Any,
    scales: Mapping[str, torch.dtype],
    left: Sequence[str] = (),
) -> Iterator[tuple[str, int, torch.dtype]]:
    """Yield the linears of a model of GPTQ or AWQ, except the head and those that stay as they are.

    Each has its name, the columns of its groups, 0 for whole rows, and the dtype of its scales.
    `left` are the starts or the ends of the names of linears that stay.
    """
    head, ends = head_of(module), tuple(left)
    for linear in model_linears(module):
        stays = linear.name == head or any(
            alias.startswith(ends) or alias.endswith(ends) for alias in names_of_module(linear.name)
        )
        if not stays:
            whole = linear.shape[1]
            columns = 0 if group_size == _WHOLE_ROWS else columns_of(group_size, whole)
            yield linear.name, columns, scales.get(f"{linear.name}.scales", linear.dtype)


_WHOLE_ROWS = -1
"""The size of groups that are whole rows."""
