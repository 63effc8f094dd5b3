"""The values of a decode step by instruction group, put together from whoever computes parts.

Hugging Face, the torch module and the program compute the same values in pieces of other sizes:
a sequence at a time, a rank at a time, an instruction at a time. Here they become whole again, and
what a side lacks, has twice from one rank, has twice with other bits, or has alone is written
down.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from tpcompile.ir.layout import Interval, Layout
from tpcompile.ir.ops.rotary import split_halves

Key = tuple[str, int | None]
"""A group by name and layer; None is outside of the layers."""


@dataclass(frozen=True)
class Group:
    """One value of a step, `[rows, columns]`: its name, its layer, and how ranks hold it."""

    name: str
    layer: int | None
    rows: int
    """A row for each sequence, or for each token of all of them."""
    columns: int
    layout: Layout | None = None
    """Which columns a rank has, in elements; None: all of them on every rank."""
    head: str = ""
    """What its columns are made of, "head" or "kv head"; empty: of rows of a weight."""
    width: int = 1
    """The columns of one head."""
    spans: int = 1
    """Into how many spans a head's columns are split."""
    interleaved: bool = False
    """Whether ranks hold the pairs of a head side by side."""
    lengths: tuple[int, ...] = ()
    """Where rows are tokens: how many of them each sequence has."""
    recomputed: bool = False
    """Whether each instruction that reads it computes it, so that a rank has it often."""

    @property
    def key(self) -> Key:
        return self.name, self.layer

    @property
    def label(self) -> str:
        return self.name if self.layer is None else f"{self.name} of layer {self.layer}"

    def intervals(self, rank: int) -> tuple[Interval, ...]:
        """The columns of a rank, in the order in which it has them."""
        return ((0, self.columns),) if self.layout is None else self.layout.intervals(rank)

    def extent(self, rank: int) -> int:
        return sum(stop - start for start, stop in self.intervals(rank))

    def sequence_of(self, row: int) -> int:
        """The sequence that a row belongs to."""
        for sequence, length in enumerate(self.lengths):
            if row < length:
                return sequence
            row -= length
        return row


@dataclass(frozen=True)
class Side:
    """All values of a step as one side has them, whole and in Hugging Face's order."""

    name: str
    values: dict[Key, torch.Tensor]
    brought: dict[Key, torch.Tensor]
    """Who computed each element, by number in `sources`."""
    sources: tuple[str, ...]
    problems: dict[Key, str]
    """What is wrong with how a value was reported."""
    unknown: dict[Key, str]
    """What no other side has, and who reported it."""


@dataclass
class _Part:
    """As much of a value as has come in."""

    values: torch.Tensor
    brought: torch.Tensor

    def earlier(self, rows: slice, columns: slice) -> int | None:
        """Who reported the first of these that has come in; None if all are new."""
        held = self.brought[rows, columns]
        known = held[held >= 0]
        return int(known[0]) if len(known) else None

    def merge(
        self, rows: slice, columns: slice, values: torch.Tensor, brought: torch.Tensor
    ) -> tuple[int, int] | None:
        """Take what is not there yet; if what is there has other bits, the two who said so."""
        held_values, held_by = self.values[rows, columns], self.brought[rows, columns]
        twice = (held_by >= 0) & (brought >= 0) & (_bits(held_values) != _bits(values))
        first = [tuple(place) for place in twice.nonzero()[:1].tolist()]
        new = held_by < 0
        self.values[rows, columns] = torch.where(new, values, held_values)
        self.brought[rows, columns] = torch.where(new, brought, held_by)
        return (int(held_by[first[0]]), int(brought[first[0]])) if first else None


@dataclass
class Pieces:
    """Takes in what a side computes, piece by piece."""

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
        """Some rows and columns of a rank's part; all of them unless given."""
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
            self._problem(key, f"{source} reports {values.dtype}, others {part.values.dtype}")
            return
        number = self._numbers.setdefault(source, len(self._numbers))
        brought = torch.full(values.shape, number, dtype=torch.int32)
        place = slice(*rows), slice(*columns)
        earlier = None if group.recomputed else part.earlier(*place)
        self._differ(key, part.merge(*place, values, brought))
        if earlier is not None:
            self._problem(key, f"twice from one rank: {self._named(earlier, number)}")

    def deal(self, key: Key, values: torch.Tensor, source: str) -> None:
        """A value that is whole already: to each rank what it would have of it."""
        for rank in range(self.ranks):
            intervals = self._groups[key].intervals(rank)
            own = torch.cat([values[:, start:stop] for start, stop in intervals], 1)
            self.put(key, own, source, rank=rank)

    def whole(self, key: Key) -> torch.Tensor:
        """A value of which all parts have come in."""
        return self._whole(self._groups[key]).values

    def side(self) -> Side:
        """All that came in, put together from the ranks."""
        found = {group.key: self._whole(group) for group in self.groups}
        return Side(
            self.name,
            {key: part.values for key, part in found.items()},
            {key: part.brought for key, part in found.items()},
            tuple(self._numbers),
            self._problems,
            self._unknown,
        )

    def _whole(self, group: Group) -> _Part:
        held = [self._parts.get((group.key, rank)) for rank in range(self.ranks)]
        dtypes = [part.values.dtype for part in held if part] or [torch.float32]
        whole = _empty(group.rows, group.columns, dtypes[0])
        for rank, part in enumerate(held):
            if part is None or bool((part.brought < 0).any()):
                self._problem(group.key, f"missing{_where(part, rank, self.ranks)}")
            if part is None:
                continue
            for columns, start, stop in _places(group, rank):
                values, brought = part.values[:, start:stop], part.brought[:, start:stop]
                self._differ(group.key, whole.merge(slice(None), columns, values, brought))
        if group.interleaved:
            whole = _Part(*(_straight(group, x) for x in (whole.values, whole.brought)))
        return whole

    def _differ(self, key: Key, disagree: tuple[int, int] | None) -> None:
        if disagree:
            self._problem(key, f"twice with other bits: {self._named(*disagree)}")

    def _named(self, *numbers: int) -> str:
        names = list(self._numbers)
        return "; ".join(names[number] for number in numbers)

    def _problem(self, key: Key, text: str) -> None:
        """The first is the one to look at."""
        self._problems.setdefault(key, text)


def _places(group: Group, rank: int) -> Iterator[tuple[slice, int, int]]:
    """Columns of the whole value, and where the rank has them."""
    offset = 0
    for start, stop in group.intervals(rank):
        yield slice(start, stop), offset, offset + stop - start
        offset += stop - start


def _empty(rows: int, columns: int, dtype: torch.dtype) -> _Part:
    values = torch.zeros((rows, columns), dtype=dtype)
    if dtype.is_floating_point:
        values.fill_(torch.nan)
    return _Part(values, torch.full((rows, columns), -1, dtype=torch.int32))


def _straight(group: Group, x: torch.Tensor) -> torch.Tensor:
    """The pairs of a head half a head apart, as Hugging Face has them."""
    return split_halves(x.view(len(x), -1, group.width)).flatten(1)


def _refusal(
    values: torch.Tensor, rows: Interval, columns: Interval, shape: tuple[int, int]
) -> str:
    """Why these cannot be a part of the value; empty if they can."""
    for (start, stop), extent, what in zip(
        (rows, columns), shape, ("rows", "columns"), strict=True
    ):
        if not 0 <= start <= stop <= extent:
            return f"{what} {start} to {stop}, of {extent}"
    wanted = (rows[1] - rows[0], columns[1] - columns[0])
    if tuple(values.shape) != wanted:
        return f"{tuple(values.shape)} values for {wanted}"
    return ""


def _where(part: _Part | None, rank: int, ranks: int) -> str:
    """Which columns nobody reported."""
    on = f" on rank {rank}" if ranks > 1 else ""
    if part is None:
        return on
    absent = (part.brought < 0).any(0).nonzero()[:, 0].tolist()
    return f"{on}: columns {absent[0]} to {absent[-1] + 1} of {part.brought.shape[1]}"


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Numbers that are equal where bits are, also of zeros with a sign and of NaN."""
    return x.contiguous().view(_WORDS[x.dtype.itemsize])
