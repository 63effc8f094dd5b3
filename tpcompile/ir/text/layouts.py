"""Layouts in the text of a graph.

Types name only the axis of a layout; the definition `q_heads = 6: 0-3 | 3-6` is in the header. The
number of elements per unit follows from the extent of the dimension, unless a fused layout has
segments with different units: then each segment gives it, as in `q_heads*16+kv_heads*8`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tpcompile.ir.layout import AnyLayout, FusedLayout, Interval, Layout, TokenLayout
from tpcompile.ir.types import AnyType, Shard, ValueType

Parts = tuple[tuple[Interval, ...], ...]
"""The intervals of units of each rank."""


class LayoutNames:
    """The layouts of a graph by name: their axis, with a number if an axis has several layouts."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, int, Parts], str] = {}
        self._count: dict[str, int] = {}

    def add_type(self, kind: AnyType) -> None:
        """Name the layouts of a type."""
        for part in kind if isinstance(kind, tuple) else (kind,):
            if isinstance(part, ValueType) and isinstance(part.placement, Shard):
                self.add(segments_of(part.placement.layout))

    def add(self, layouts: Iterable[Layout]) -> None:
        for layout in layouts:
            key = layout.axis, layout.units, layout.parts
            if key not in self._names:
                count = self._count[layout.axis] = self._count.get(layout.axis, 0) + 1
                self._names[key] = layout.axis if count == 1 else f"{layout.axis}#{count}"

    def written(self, layout: AnyLayout) -> str:
        """Return a layout as types show it."""
        segments = segments_of(layout)
        if not segments:
            return str(layout)
        names = [self._names[s.axis, s.units, s.parts] for s in segments]
        if len({segment.grain for segment in segments}) > 1:
            names = [f"{name}*{s.grain}" for name, s in zip(names, segments, strict=True)]
        return "+".join(names)

    def definitions(self) -> Iterator[str]:
        """Yield one line per layout."""
        for (_, units, parts), name in self._names.items():
            ranks = (" ".join(f"{start}-{stop}" for start, stop in part) for part in parts)
            yield f"{name} = {units}: {' | '.join(ranks)}"


def segments_of(layout: AnyLayout) -> tuple[Layout, ...]:
    """Return the layouts of an axis, or none for tokens, whose number is not known."""
    if isinstance(layout, TokenLayout):
        return ()
    return layout.segments if isinstance(layout, FusedLayout) else (layout,)
