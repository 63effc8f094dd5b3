"""The part of a long program that a picture shows: whole ranks, and some layers."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from tpcompile.errors import UsageError
from tpcompile.inspect.timeline import Timeline, layer_of
from tpcompile.vm.program.instruction import Range

MOST_ROWS, MOST_SLICES, SLICES_A_ROW = 160, 3000, 40


@dataclass(frozen=True)
class Window:
    """The first `rows` tracks, from the time `start` to the time `stop`."""

    rows: int
    start: float
    stop: float
    whole: bool
    description: str
    """A description of the part that is shown, such as "layers 0 to 5 of 28"."""

    def shows(self, start: float, finish: float) -> bool:
        """Return whether some of this time is in the window."""
        return start < self.stop and (finish > self.start or start >= self.start)


def window_of(timeline: Timeline, layers: Range | None = None) -> Window:
    """Return the time of some layers, or of the first ones that are legible in a small file."""
    rows = _rows(timeline)
    return _first_layers(timeline, rows) if layers is None else _chosen(timeline, rows, layers)


def _chosen(timeline: Timeline, rows: int, layers: Range) -> Window:
    count = _layers(timeline)
    if not 0 <= layers.start < layers.stop <= count:
        raise UsageError(
            f"The layers of a picture must be a part of 0:{count}, "
            f"got {layers.start}:{layers.stop}",
            hint="A:B are the layers from A to B-1",
        )
    numbers = [
        number
        for number, instruction in enumerate(timeline.program.instructions)
        if (layer := layer_of(instruction)) is not None and layers.start <= layer < layers.stop
    ]
    start = min(timeline.timing.starts[number] for number in numbers)
    stop = max(timeline.timing.finishes[number] for number in numbers)
    description = _layers_text(layers.start, layers.stop - 1, count) + _workers_text(timeline, rows)
    return Window(rows, start, stop, False, description)


def _first_layers(timeline: Timeline, rows: int) -> Window:
    shown = [number for row in timeline.rows[:rows] for number in row]
    starts = sorted(timeline.timing.starts[number] for number in shown)
    most = min(MOST_SLICES, SLICES_A_ROW * rows)
    end = timeline.timing.makespan
    scope = _workers_text(timeline, rows)
    if len(starts) <= most:
        return Window(rows, 0.0, end, not scope, f"the whole duration{scope}" if scope else "")
    fitting = [
        (layer, stop)
        for layer, stop in _layer_ends(timeline)
        if bisect_left(starts, stop) <= most and stop < end
    ]
    if not fitting:
        return Window(rows, 0.0, starts[most], False, f"the first {most:,} instructions{scope}")
    layer, stop = fitting[-1]
    return Window(rows, 0.0, stop, False, _layers_text(0, layer, _layers(timeline)) + scope)


def _layers_text(first: int, last: int, count: int) -> str:
    shown = f"layer {first}" if first == last else f"layers {first} to {last}"
    return f"{shown} of {count}"


def _rows(timeline: Timeline) -> int:
    """Return the number of rows: a multiple of the workers per rank if at least one rank fits."""
    count = len(timeline.tracks)
    if count <= MOST_ROWS:
        return count
    workers = count // timeline.program.ranks
    return workers * (MOST_ROWS // workers) if workers <= MOST_ROWS else MOST_ROWS


def _workers_text(timeline: Timeline, rows: int) -> str:
    """Describe the workers that are shown; return an empty string if all are."""
    count, ranks = len(timeline.tracks), timeline.program.ranks
    if rows == count:
        return ""
    if rows * ranks % count:
        return f", workers 0 to {rows - 1} of {count // ranks}" + " of rank 0" * (ranks > 1)
    last = rows * ranks // count - 1
    return f", rank 0 of {ranks}" if last == 0 else f", ranks 0 to {last} of {ranks}"


def _layers(timeline: Timeline) -> int:
    layers = (layer_of(instruction) for instruction in timeline.program.instructions)
    return 1 + max((layer for layer in layers if layer is not None), default=-1)


def _layer_ends(timeline: Timeline) -> list[tuple[int, float]]:
    """Return the time at which each layer ends, in layer order."""
    ends: dict[int, float] = {}
    for number, instruction in enumerate(timeline.program.instructions):
        layer = layer_of(instruction)
        if layer is not None:
            ends[layer] = max(ends.get(layer, 0.0), timeline.timing.finishes[number])
    return sorted(ends.items())
