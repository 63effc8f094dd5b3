"""Assembly of equal layers: a few of them are assembled, and the others are copies.

Two layers are alike if their instructions have the same costs and access the same parts of
buffers. Each layer may also have parts of its own, as its cache is. A program in which all but four
layers are left out then has the same dependencies, and its queues and counters normally repeat from
layer to layer. If they do, the layers that were left out are inserted again as copies of the third.
The result is that of assembling the whole program, and the verifier proves all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from math import isclose
from typing import NamedTuple, TypeVar

from tpcompile.vm.program import Wait
from tpcompile.vm.proof.cells import Parts
from tpcompile.vm.proof.counters import Ordering
from tpcompile.vm.schedule.policies import Queues

_KEPT = 4
"""The layers that are not left out: the first three and the last."""
T = TypeVar("T", int, float)


class _Zones(NamedTuple):
    """The first instructions of layers in a program of four, and the first one after them."""

    second: int
    third: int
    last: int
    tail: int


@dataclass(frozen=True)
class Layers:
    """Layers that are alike, except that the first may differ."""

    first: int
    """The number of the first layer's first instruction."""
    size: int
    """The number of instructions of a layer."""
    count: int

    @property
    def copies(self) -> int:
        """The number of layers that are left out, and inserted as copies."""
        return self.count - _KEPT

    @property
    def left_out(self) -> slice:
        start = self._zones.last
        return slice(start, start + self.copies * self.size)

    @property
    def _zones(self) -> _Zones:
        return _Zones(*(self.first + n * self.size for n in range(1, _KEPT + 1)))

    def few(self, values: Sequence[T]) -> list[T]:
        """Return the values of the instructions without those that are left out."""
        return list(values[: self.left_out.start]) + list(values[self.left_out.stop :])

    def queues(self, few: Queues) -> Queues | None:
        """Insert the copies into the queues of four layers; None if these do not repeat."""
        found: list[tuple[int, ...]] = []
        for queue in few:
            head, second, third, last, tail = parts = self._split(queue)
            if tuple(chain(*parts)) != queue:  # a layer begins before the one before it ends
                return None
            if _moved(second, self.size) != third or _moved(third, self.size) != last:
                return None
            copies = (_moved(third, n * self.size) for n in range(1, self.copies + 1))
            rest = _moved(last + tail, self.copies * self.size)
            found.append((*head, *second, *third, *chain(*copies), *rest))
        return tuple(found)

    def _split(self, queue: Sequence[int]) -> list[tuple[int, ...]]:
        edges = (0, *self._zones, max(queue, default=0) + 1)
        return [
            tuple(number for number in queue if start <= number < stop)
            for start, stop in pairwise(edges)
        ]

    def ordering(self, few: Ordering) -> Ordering | None:
        """Insert the copies into the counters of four layers; None if these do not repeat."""
        counters = _Counters(self._zones, few)
        if not counters.repeat:
            return None
        at, first, each = self._zones, counters.first, counters.each
        found = [_renamed(few, slice(0, at.last), _from(first.tail, self.copies * each))]
        for copy in range(1, self.copies + 1):
            found.append(_renamed(few, slice(at.third, at.last), _from(0, copy * each)))
        found.append(_renamed(few, slice(at.last, None), _from(first.third, self.copies * each)))
        waits, signals = zip(*((some.waits, some.signals) for some in found), strict=True)
        return Ordering(tuple(chain(*waits)), tuple(chain(*signals)))

    def longest(self, few: Sequence[float]) -> float | None:
        """Return the longest of all paths, given the longest from each instruction of four layers.

        Each copy adds the same time to all of them; None if it does not.
        """
        at = self._zones
        each = few[at.second] - few[at.third]
        pairs = zip(few[at.second : at.third], few[at.third : at.last], strict=True)
        if not all(isclose(one - other, each, rel_tol=1e-6) for one, other in pairs):
            return None
        return max(few) + self.copies * each


class _Counters:
    """The counters of four layers, which are numbered in the order of their first waits."""

    def __init__(self, zones: _Zones, few: Ordering) -> None:
        self._zones, self._few = zones, few
        first = [0]
        for start, stop in pairwise((0, *zones)):
            waited = (w.counter for own in few.waits[start:stop] for w in own if w.until > 0)
            first.append(max(first[-1], 1 + max(waited, default=-1)))
        self.first = _Zones(*first[1:])
        """The first counter of each layer, and of the instructions after the layers."""
        self.each = self.first.tail - self.first.last
        """The number of counters of a layer."""

    @property
    def repeat(self) -> bool:
        """Whether the middle layers and the last use counters in the same way."""
        at, first, few, each = self._zones, self.first, self._few, self.each
        second, third = slice(at.second, at.third), slice(at.third, at.last)
        last = slice(at.last, at.tail)
        moved, moved_again = (_renamed(few, own, _from(0, each)) for own in (second, third))
        early = chain(*few.signals[: at.second])
        late = chain((wait.counter for own in few.waits[last] for wait in own), *few.signals[last])
        return (
            first.third - first.second == first.last - first.third == each
            and moved == Ordering(few.waits[third], few.signals[third])
            and moved_again.waits == few.waits[last]
            and max(chain(*few.signals[third]), default=0) < first.tail
            and not any(first.last <= counter < first.tail for counter in early)
            and min(late, default=first.third) >= first.third
        )


def _from(first: int, by: int) -> Callable[[int], int]:
    """Return a function that adds `by` to the numbers of counters from `first` on."""
    return lambda counter: counter + by if counter >= first else counter


def _renamed(ordering: Ordering, some: slice, name: Callable[[int], int]) -> Ordering:
    """Return the waits and signals of some instructions, with other numbers for counters."""
    return Ordering(
        tuple([tuple([Wait(name(c), until) for c, until in own]) for own in ordering.waits[some]]),
        tuple([tuple(map(name, own)) for own in ordering.signals[some]]),
    )


def _moved(numbers: tuple[int, ...], by: int) -> tuple[int, ...]:
    return tuple([number + by for number in numbers])


def alike_layers(
    parts: Parts, layers: Sequence[int], ranks_of: Sequence[int], costs: Sequence[float]
) -> Layers | None:
    """Return the layers of a program if all but the first are alike, and enough to leave some out.

    `layers` has the layer of each instruction, -1 outside the layers.
    """
    count = max(layers, default=-1) + 1
    if count <= _KEPT or 0 not in layers:
        return None
    first, size = layers.index(0), layers.count(0)
    end = first + count * size
    tail = len(layers) - end
    expected = chain([-1] * first, *([n] * size for n in range(count)), [-1] * tail)
    if list(layers) != list(expected):
        return None
    seen = _Seen(parts)
    seen.read(0, first + size)
    kind: object = None
    own: list[int] = []
    """For each layer after the first, the number of its first part."""
    for start in range(first + size, end, size):
        stop = start + size
        own.append(seen.count)
        found = seen.read(start, stop), ranks_of[start:stop], costs[start:stop]
        if kind not in (None, found):
            return None
        kind = found
    left_out = range(own[_KEPT - 2], own[-1])
    if any(part in left_out for part in seen.accesses(end, len(layers))):
        return None
    return Layers(first, size, count)


class _Seen:
    """The parts that instructions have accessed so far. They are numbered in that order."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.count = 0

    def accesses(self, start: int, stop: int) -> list[int]:
        """Return the parts that these instructions access."""
        parts = self._parts
        every = (parts.reads[start:stop], parts.writes[start:stop], parts.joins[start:stop])
        return [part for own in every for some in own for part in some]

    def read(self, start: int, stop: int) -> object:
        """Return all accesses of these instructions, with new parts numbered from -1 downwards."""
        parts, before = self._parts, self.count
        found = self.accesses(start, stop)
        self.count = max(before, 1 + max(found, default=-1))
        new = range(before, self.count)
        return (
            [part if part < before else before - 1 - part for part in found],
            [list(map(len, own[start:stop])) for own in (parts.reads, parts.writes, parts.joins)],
            parts.arrivals[start:stop],
            [parts.cells[part] for part in new],
            [[other - before for other in parts.near[part]] for part in new],
        )
