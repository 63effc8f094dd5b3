"""The kinds and operands of instructions, as columns.

Instructions that share their operands `at` form a group. Layer, rank and kind are stored once per
group, and an instruction's own operands in columns of its kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np

from tpcompile.inspect.explorer.columns import small
from tpcompile.ir.dtypes import DType
from tpcompile.vm.program.fields import field_types
from tpcompile.vm.program.instruction import Range, StepInstruction


@dataclass(frozen=True)
class Groups:
    """The groups of instructions of the same kind that share operands."""

    first: tuple[StepInstruction, ...]
    """The first instruction of each group."""
    numbers: np.ndarray
    """The group of each instruction."""
    words: list[str]
    """The distinct words of groups in labels, such as `q`."""

    @staticmethod
    def of_all(instructions: Sequence[StepInstruction]) -> Groups:
        """Collect the groups."""
        numbers: dict[tuple[type, int], int] = {}
        first: list[StepInstruction] = []
        of = [0] * len(instructions)
        for number, instruction in enumerate(instructions):
            key = type(instruction), id(instruction.at)
            if key not in numbers:
                numbers[key] = len(numbers)
                first.append(instruction)
            of[number] = numbers[key]
        return Groups(tuple(first), small(of), list(dict.fromkeys(map(words_of_group, first))))


def words_of_group(instruction: StepInstruction) -> str:
    """Return the words of shared operands that the label of an instruction has after its name."""
    shared = vars(instruction.at).values()
    return " ".join(
        value.name.lower()
        for value in shared
        if isinstance(value, IntEnum) and not isinstance(value, DType)
    )


def operand_data(
    instructions: Sequence[StepInstruction], groups: Groups
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Return the kinds with the fields of their own operands, and the columns of both.

    An operand that is a range has two numbers per instruction in its column.
    """
    members: dict[Any, list[StepInstruction]] = {}
    for instruction in instructions:
        members.setdefault(type(instruction), []).append(instruction)
    places = {kind: place for place, kind in enumerate(members)}
    words = {word: place for place, word in enumerate(groups.words)}
    columns = {
        "group": groups.numbers,
        "group_kind": small(places[type(instruction)] for instruction in groups.first),
        "group_layer": small(instruction.layer for instruction in groups.first),
        "group_rank": small(instruction.rank for instruction in groups.first),
        "group_words": small(words[words_of_group(instruction)] for instruction in groups.first),
    }
    kinds = []
    for kind, instances in members.items():
        fields = [(name, type_ is Range) for name, type_ in field_types(kind) if name != "at"]
        for name, is_range in fields:
            values: Any = map(attrgetter(name), instances)
            column = small(chain.from_iterable(values) if is_range else values)
            columns[f"own_{places[kind]}_{name}"] = column
        described = [{"name": name, "range": is_range} for name, is_range in fields]
        kinds.append({"name": kind.name, "fields": described})
    return kinds, columns
