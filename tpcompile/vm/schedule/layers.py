"""Assembly of layers that repeat: a few of them are assembled, and the others are copies.

Two layers are alike if their instructions have the same costs and access the same parts of
buffers. Each layer may also have parts of its own, such as its cache. Layers of several kinds may
repeat in turn; a period is then one layer of each. A program in which all but three periods are
left out has the same dependencies, and its queues and counters normally repeat from period to
period. If they do, the periods that were left out are inserted again as copies of the second. The
result is that of assembling the whole program, and the verifier proves all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise, starmap
from math import isclose
from typing import NamedTuple, TypeVar

from tpcompile.alike import kinds_of, repeat_of
from tpcompile.vm.program import Wait
from tpcompile.vm.proof.cells import Parts
from tpcompile.vm.proof.counters import Ordering
from tpcompile.vm.schedule.policies import Queues

_KEPT = 3
"""The periods that are not left out: the first two and the last."""
T = TypeVar("T", int, float)


class _Zones(NamedTuple):
    """The first instructions of the periods in a program of three, and the first one after them."""

    first: int
    second: int
    last: int
    tail: int


@dataclass(frozen=True)
class Layers:
    """Layers that repeat; those before and after them may differ."""

    start: int
    """The number of the first instruction."""
    size: int
    """The number of instructions of a period."""
    count: int
    """The number of periods."""

    @property
    def copies(self) -> int:
        """The number of periods that are left out, and inserted as copies."""
        return self.count - _KEPT

    @property
    def left_out(self) -> slice:
        start = self._zones.last
        return slice(start, start + self.copies * self.size)

    @property
    def _zones(self) -> _Zones:
        return _Zones(*(self.start + n * self.size for n in range(_KEPT + 1)))

    def few(self, values: Sequence[T]) -> list[T]:
        """Return the values of the instructions without those that are left out."""
        return list(values[: self.left_out.start]) + list(values[self.left_out.stop :])

    def queues(self, few: Queues) -> Queues | None:
        """Insert the copies into the queues of three periods; None if these do not repeat."""
        queues: list[tuple[int, ...]] = []
        for queue in few:
            head, first, second, last, tail = parts = self._split(queue)
            if tuple(chain(*parts)) != queue:  # a period begins before the one before it ends
                return None
            if _moved(first, self.size) != second or _moved(second, self.size) != last:
                return None
            copies = (_moved(second, n * self.size) for n in range(1, self.copies + 1))
            end = _moved(last + tail, self.copies * self.size)
            queues.append((*head, *first, *second, *chain(*copies), *end))
        return tuple(queues)

    def _split(self, queue: Sequence[int]) -> list[tuple[int, ...]]:
        edges = (0, *self._zones, max(queue, default=0) + 1)
        return [
            tuple(number for number in queue if start <= number < stop)
            for start, stop in pairwise(edges)
        ]

    def ordering(self, few: Ordering) -> Ordering | None:
        """Insert the copies into the counters of three periods; None if these do not repeat."""
        counters = _Counters(self._zones, few)
        if not counters.repeat:
            return None
        zones, first, count = self._zones, counters.first, counters.per_period
        pieces = [_renamed(few, slice(0, zones.last), _from(first.tail, self.copies * count))]
        for copy in range(1, self.copies + 1):
            pieces.append(_renamed(few, slice(zones.second, zones.last), _from(0, copy * count)))
        pieces.append(
            _renamed(few, slice(zones.last, None), _from(first.second, self.copies * count))
        )
        waits, signals = zip(*((piece.waits, piece.signals) for piece in pieces), strict=True)
        return Ordering(tuple(chain(*waits)), tuple(chain(*signals)))

    def longest(self, few: Sequence[float]) -> float | None:
        """Return the longest of all paths, given the longest from each instruction of the few.

        Each copy adds the same time to all of them; None if it does not.
        """
        zones = self._zones
        increment = few[zones.first] - few[zones.second]
        pairs = zip(few[zones.first : zones.second], few[zones.second : zones.last], strict=True)
        if not all(isclose(early - late, increment, rel_tol=1e-6) for early, late in pairs):
            return None
        return max(few) + self.copies * increment


class _Counters:
    """The counters of three periods, which are numbered in the order of their first waits."""

    def __init__(self, zones: _Zones, few: Ordering) -> None:
        self._zones, self._few = zones, few
        first = [0]
        for start, stop in pairwise((0, *zones)):
            waited = (w.counter for waits in few.waits[start:stop] for w in waits if w.until > 0)
            first.append(max(first[-1], 1 + max(waited, default=-1)))
        self.first = _Zones(*first[1:])
        """The first counter of each period, and of the instructions after them."""
        self.per_period = self.first.tail - self.first.last
        """The number of counters of a period."""

    @property
    def repeat(self) -> bool:
        """Whether all periods use counters in the same way."""
        zones, first, few, count = self._zones, self.first, self._few, self.per_period
        initial, middle, last = starmap(slice, pairwise(zones))
        moved, moved_again = (
            _renamed(few, period, _from(0, count)) for period in (initial, middle)
        )
        early = chain(*few.signals[: zones.first])
        late = chain(
            (wait.counter for waits in few.waits[last] for wait in waits), *few.signals[last]
        )
        return (
            first.second - first.first == first.last - first.second == count
            and moved == Ordering(few.waits[middle], few.signals[middle])
            and moved_again.waits == few.waits[last]
            and max(chain(*few.signals[middle]), default=0) < first.tail
            and not any(first.last <= counter < first.tail for counter in early)
            and min(late, default=first.second) >= first.second
        )


def _from(first: int, increment: int) -> Callable[[int], int]:
    """Return a function that adds `increment` to the numbers of counters from `first` on."""
    return lambda counter: counter + increment if counter >= first else counter


def _renamed(ordering: Ordering, span: slice, name: Callable[[int], int]) -> Ordering:
    """Return the waits and signals of some instructions, with other numbers for counters."""
    return Ordering(
        tuple(
            [tuple([Wait(name(c), until) for c, until in waits]) for waits in ordering.waits[span]]
        ),
        tuple([tuple(map(name, counters)) for counters in ordering.signals[span]]),
    )


def _moved(numbers: tuple[int, ...], increment: int) -> tuple[int, ...]:
    return tuple([number + increment for number in numbers])


def repeated_layers(
    parts: Parts, layers: Sequence[int], ranks_of: Sequence[int], costs: Sequence[float]
) -> Layers | None:
    """Return the layers of a program that repeat, if there are enough to leave some out.

    `layers` has the layer of each instruction, -1 outside the layers.
    """
    pairs = enumerate(pairwise((-1, *layers, -1)))
    edges = [number for number, (before, layer) in pairs if before != layer]
    if not edges or [layers[n] for n in edges[:-1]] != list(range(len(edges) - 1)):
        return None
    accesses = [parts.accesses(start, stop) for start, stop in pairwise((0, *edges[1:]))]
    counts = list(accumulate((1 + max(numbers, default=-1) for numbers in accesses), max))
    """By layer, the number of parts that are accessed before the next layer."""
    keys: list[Hashable] = [None]  # nothing is like the first layer
    for layer, span in enumerate(map(slice, edges[1:-1], edges[2:]), start=1):
        new = range(*counts[layer - 1 : layer + 1])
        uses = _uses(parts, span, accesses[layer], new)
        keys.append((uses, tuple(ranks_of[span]), tuple(costs[span])))
    repeat = repeat_of(kinds_of(keys), _KEPT)
    if repeat is None:
        return None
    start, period = repeat.start, repeat.period
    repeated = Layers(edges[start], edges[start + period] - edges[start], repeat.count)
    first, last = start + (_KEPT - 1) * period, start + (repeat.count - 1) * period
    left_out = range(counts[first - 1], counts[last - 1])
    later = parts.accesses(repeated.left_out.stop, len(layers))
    return None if any(part in left_out for part in later) else repeated


def _uses(parts: Parts, span: slice, accesses: Sequence[int], new: range) -> Hashable:
    """Return the accesses of some instructions. Their `new` parts count from -1 downwards."""
    accessed = parts.reads[span], parts.writes[span], parts.joins[span]
    return (
        tuple([part if part < new.start else new.start - 1 - part for part in accesses]),
        tuple([tuple(map(len, lists)) for lists in accessed]),
        tuple(map(tuple, parts.arrivals[span])),
        tuple([parts.cells[part] for part in new]),
        tuple([tuple([other - new.start for other in parts.near[part]]) for part in new]),
    )
