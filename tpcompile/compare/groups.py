"""The values of a decode step by instruction group, assembled from their parts.

Hugging Face, the torch module and the program compute the same values in different parts: per
sequence, per rank, per instruction. This module assembles whole values from them. It records
values that are missing on a side, reported twice by one rank, reported with different bits, or
reported by one side alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from tpcompile.ir.layout import FusedLayout, Interval, Layout
from tpcompile.ir.ops.rotary import split_halves

Key = tuple[str, int | None]
"""A group by name and layer. The layer is None outside the layers."""


@dataclass(frozen=True)
class Group:
    """A value of a step, `[rows, columns]`: its name, its layer and its layout."""

    name: str
    layer: int | None
    rows: int
    """The number of sequences, or of tokens in all sequences."""
    columns: int
    layout: Layout | FusedLayout | None = None
    """The columns of each rank, in elements; None if every rank has all of them."""
    head: str = ""
    """The unit of the columns, such as "kv head"; empty if they are rows of a weight."""
    width: int = 1
    """The number of columns of one head."""
    spans: int = 1
    """The number of spans that the columns of a head are split into."""
    interleaved: bool = False
    """Whether the ranks store the two elements of a rotated pair next to each other."""
    lengths: tuple[int, ...] = ()
    """The number of tokens of each sequence, if rows are tokens."""
    recomputed: bool = False
    """Whether each instruction that reads it computes it, so that a rank reports it repeatedly."""

    @property
    def key(self) -> Key:
        return self.name, self.layer

    @property
    def label(self) -> str:
        return self.name if self.layer is None else f"{self.name} of layer {self.layer}"

    def intervals(self, rank: int) -> tuple[Interval, ...]:
        """Return the columns of a rank, in the order in which the rank stores them."""
        return ((0, self.columns),) if self.layout is None else self.layout.intervals(rank)

    def extent(self, rank: int) -> int:
        return sum(stop - start for start, stop in self.intervals(rank))

    def sequence_of(self, row: int) -> int:
        """Return the sequence that a row belongs to."""
        for sequence, length in enumerate(self.lengths):
            if row < length:
                return sequence
            row -= length
        return row


@dataclass(frozen=True)
class Side:
    """All values of a step on one side, whole and in Hugging Face's order."""

    name: str
    values: dict[Key, torch.Tensor]
    source_indices: dict[Key, torch.Tensor]
    """The source of each element, as an index into `sources`."""
    sources: tuple[str, ...]
    problems: dict[Key, str]
    """Values that were reported incompletely, twice or inconsistently, and the errors."""
    unknown: dict[Key, str]
    """Values that belong to no group, and their sources."""


@dataclass
class _Part:
    """The part of a value that has been reported so far."""

    values: torch.Tensor
    source_indices: torch.Tensor

    def earlier(self, rows: slice, columns: slice) -> int | None:
        """Return the source of the first known element, or None if all are new."""
        held = self.source_indices[rows, columns]
        known = held[held >= 0]
        return int(known[0]) if len(known) else None

    def merge(
        self, rows: slice, columns: slice, values: torch.Tensor, source_indices: torch.Tensor
    ) -> tuple[int, int] | None:
        """Merge new elements. Return the conflicting sources if known elements have other bits."""
        held_values, held_by = self.values[rows, columns], self.source_indices[rows, columns]
        twice = (held_by >= 0) & (source_indices >= 0) & (_bits(held_values) != _bits(values))
        first = [tuple(place) for place in twice.nonzero()[:1].tolist()]
        new = held_by < 0
        self.values[rows, columns] = torch.where(new, values, held_values)
        self.source_indices[rows, columns] = torch.where(new, source_indices, held_by)
        return (int(held_by[first[0]]), int(source_indices[first[0]])) if first else None


@dataclass
class Pieces:
    """The values that a side computes, collected piece by piece."""

    name: str
    groups: Sequence[Group]
    ranks: int = 1
    _parts: dict[tuple[Key, int], _Part] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)
    _problems: dict[Key, str] = field(default_factory=dict)
    _unknown: dict[Key, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._groups = {group.key: group for group in self.groups}

    def put(
        self,
        key: Key,
        values: torch.Tensor,
        source: str,
        *,
        rank: int = 0,
        rows: Interval | None = None,
        columns: Interval | None = None,
    ) -> None:
        """Add some rows and columns of a rank's part, by default all of them."""
        group = self._groups.get(key)
        if group is None:
            self._unknown.setdefault(key, source)
            return
        wide = group.extent(rank)
        rows, columns = rows or (0, group.rows), columns or (0, wide)
        if refusal := _refusal(values, rows, columns, (group.rows, wide)):
            self._problem(key, f"{source} reports {refusal}")
            return
        part = self._parts.get((key, rank))
        if part is None:
            part = self._parts[key, rank] = _empty(group.rows, wide, values.dtype)
        if part.values.dtype != values.dtype:
            self._problem(
                key, f"{source} reports {values.dtype}, others report {part.values.dtype}"
            )
            return
        number = self._numbers.setdefault(source, len(self._numbers))
        source_indices = torch.full(values.shape, number, dtype=torch.int32)
        place = slice(*rows), slice(*columns)
        earlier = None if group.recomputed else part.earlier(*place)
        self._differ(key, part.merge(*place, values, source_indices))
        if earlier is not None:
            self._problem(key, f"reported twice by one rank: {self._named(earlier, number)}")

    def deal(self, key: Key, values: torch.Tensor, source: str) -> None:
        """Split a whole value into the parts of the ranks, and add them."""
        for rank in range(self.ranks):
            intervals = self._groups[key].intervals(rank)
            part = torch.cat([values[:, start:stop] for start, stop in intervals], 1)
            self.put(key, part, source, rank=rank)

    def whole(self, key: Key) -> torch.Tensor:
        """Return a value after all its parts have been added."""
        return self._whole(self._groups[key]).values

    def side(self, optional: Collection[str] = ()) -> Side:
        """Assemble all values from the parts of the ranks, except optional ones without parts."""
        reported = {key for key, _ in self._parts}
        groups = [g for g in self.groups if g.name not in optional or g.key in reported]
        wholes = {group.key: self._whole(group) for group in groups}
        return Side(
            self.name,
            {key: part.values for key, part in wholes.items()},
            {key: part.source_indices for key, part in wholes.items()},
            tuple(self._numbers),
            self._problems,
            self._unknown,
        )

    def _whole(self, group: Group) -> _Part:
        held = [self._parts.get((group.key, rank)) for rank in range(self.ranks)]
        dtypes = [part.values.dtype for part in held if part] or [torch.float32]
        whole = _empty(group.rows, group.columns, dtypes[0])
        for rank, part in enumerate(held):
            if part is None or bool((part.source_indices < 0).any()):
                self._problem(group.key, f"missing{_missing_columns(part, rank, self.ranks)}")
            if part is None:
                continue
            for columns, start, stop in _places(group, rank):
                values, source_indices = (
                    part.values[:, start:stop],
                    part.source_indices[:, start:stop],
                )
                self._differ(group.key, whole.merge(slice(None), columns, values, source_indices))
        if group.interleaved:
            whole = _Part(
                *(_straight(group, tensor) for tensor in (whole.values, whole.source_indices))
            )
        return whole

    def _differ(self, key: Key, disagree: tuple[int, int] | None) -> None:
        if disagree:
            self._problem(key, f"reported with different bits: {self._named(*disagree)}")

    def _named(self, *numbers: int) -> str:
        names = list(self._numbers)
        return "; ".join(names[number] for number in numbers)

    def _problem(self, key: Key, text: str) -> None:
        """Record the first problem of a value."""
        self._problems.setdefault(key, text)


def _places(group: Group, rank: int) -> Iterator[tuple[slice, int, int]]:
    """Yield columns of the whole value, and their position on the rank."""
    offset = 0
    for start, stop in group.intervals(rank):
        yield slice(start, stop), offset, offset + stop - start
        offset += stop - start


def _empty(rows: int, columns: int, dtype: torch.dtype) -> _Part:
    values = torch.zeros((rows, columns), dtype=dtype)
    if dtype.is_floating_point:
        values.fill_(torch.nan)
    return _Part(values, torch.full((rows, columns), -1, dtype=torch.int32))


def _straight(group: Group, values: torch.Tensor) -> torch.Tensor:
    """Move the elements of each pair half a head apart, as in Hugging Face."""
    return split_halves(values.view(len(values), -1, group.width)).flatten(1)


def _refusal(
    values: torch.Tensor, rows: Interval, columns: Interval, shape: tuple[int, int]
) -> str:
    """Return the mismatch between the values and this part, or an empty string."""
    for (start, stop), extent, axis in zip(
        (rows, columns), shape, ("rows", "columns"), strict=True
    ):
        if not 0 <= start <= stop <= extent:
            return f"{axis} {start} to {stop} of {extent}"
    wanted = (rows[1] - rows[0], columns[1] - columns[0])
    if tuple(values.shape) != wanted:
        return f"shape {tuple(values.shape)}, expected {wanted}"
    return ""


def _missing_columns(part: _Part | None, rank: int, ranks: int) -> str:
    """Describe the columns that were not reported."""
    suffix = f" on rank {rank}" if ranks > 1 else ""
    if part is None:
        return suffix
    absent = (part.source_indices < 0).any(0).nonzero()[:, 0].tolist()
    return f"{suffix}: columns {absent[0]} to {absent[-1] + 1} of {part.source_indices.shape[1]}"


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(values: torch.Tensor) -> torch.Tensor:
    """View the values as integers, which compare bitwise, also for signed zeros and NaN."""
    return values.contiguous().view(_WORDS[values.dtype.itemsize])
