"""A picture of a schedule: one row per worker, time from left to right, one colour per kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tpcompile.inspect import svg
from tpcompile.inspect.colours import colour_of
from tpcompile.inspect.occupancy import occupancy
from tpcompile.inspect.timeline import Timeline, layer_of
from tpcompile.inspect.window import Window, window_of
from tpcompile.vm.program.instruction import Range

_WIDTH, _LEFT, _RIGHT, _TOP = 1400, 96, 44, 36
_TICKS, _TICK_ROOM, _LAYER_ROOM = 10, 24, 14
_STRIP, _STRIP_GAP = 44, 8
_RANK_GAP = 22
_CHAIN = f'fill="none" stroke="{svg.INK}" stroke-width="1.6"'
_SMALLEST = 0.4
"""The minimum width of a slice, in pixels."""


@dataclass(frozen=True)
class _Scale:
    """The horizontal scale: converts times to pixels."""

    start: float
    stop: float

    def x(self, moment: float) -> float:
        extent = self.stop - self.start
        part = min(max((moment - self.start) / extent, 0.0), 1.0) if extent else 0.0
        return _LEFT + part * (_WIDTH - _LEFT - _RIGHT)


@dataclass(frozen=True)
class _Row:
    """The vertical position of a track."""

    track: int
    top: float
    height: float


def gantt_svg(
    timeline: Timeline,
    title: str,
    critical: float,
    notes: Sequence[str] = (),
    layers: Range | None = None,
) -> str:
    """Draw the picture. For a long program, draw an overview and below it some layers.

    `critical` is the time that the program takes with an unlimited number of workers. `notes` are
    lines below the figures. `layers` are those to show in detail; by default the first ones.
    """
    window = window_of(timeline, layers)
    kinds = list(dict.fromkeys(instruction.name for instruction in timeline.program.instructions))
    head, y = _head(timeline, title, critical, notes)
    legend, y = _legend(timeline, window, kinds, y)
    head += legend
    overview: list[str] = []
    if not window.whole:
        overview, y = _overview(timeline, window, kinds, y + 8)
        overview.append(
            svg.words(_LEFT, y + 20, f"Shown below: {window.description}", 13, bold=True)
        )
        y += 28
    top = y + _TICK_ROOM + _LAYER_ROOM
    rows = _rows(timeline, window, top)
    bottom = rows[-1].top + rows[-1].height if rows else top
    scale = _Scale(window.start, window.stop)
    body = [
        *_axis(scale, y + _TICK_ROOM - 6, bottom),
        *_layers(timeline, scale, top - 4),
        *_names(timeline, rows),
        *_slices(timeline, window, rows),
    ]
    return svg.document(_WIDTH, bottom + 24, title, [*head, *overview, *body])


def _head(
    timeline: Timeline, title: str, critical: float, notes: Sequence[str]
) -> tuple[list[str], float]:
    """Draw the title and the figures, and return the y position below them."""
    program, y = timeline.program, float(_TOP)
    figures = (
        f"{len(program.instructions):,} instructions",
        f"{len(timeline.tracks):,} workers"
        + (f" of {program.ranks} ranks" if program.ranks > 1 else ""),
        f"{program.counters:,} counters",
        f"makespan {timeline.timing.makespan:,.1f} µs",
        f"critical path {critical:,.1f} µs",
        f"idle {timeline.idle:.1%}".replace("%", " %"),
    )
    room = _WIDTH - _LEFT - _RIGHT
    parts = [
        svg.words(_LEFT, y, svg.shortened(title, 18, room), 18, bold=True),
        svg.words(_LEFT, y + 22, " · ".join(figures), 13, fill=svg.QUIET),
    ]
    y += 22
    for note in notes:
        y += 20
        parts.append(svg.words(_LEFT, y, svg.shortened(note, 13, room), 13, fill=svg.QUIET))
    return parts, y + 24


def _legend(
    timeline: Timeline, window: Window, kinds: Sequence[str], y: float
) -> tuple[list[str], float]:
    """Draw the legend of colours and outlines, and return the y position below it."""
    parts: list[str] = []
    x = float(_LEFT)
    timing = timeline.timing
    shown = sum(
        timing.workers[n] < window.rows and window.shows(timing.starts[n], timing.finishes[n])
        for n in timeline.chain
    )
    count = f"{len(timeline.chain):,} instructions"
    if not window.whole:
        count += f", {shown:,} of them shown below"
    chain = f"outlined: the critical path ({count})"
    for name, colour in [*((kind, colour_of(kind)) for kind in kinds), (chain, "")]:
        wide = 18 + svg.text_width(name, 12) + 18
        if x > _LEFT and x + wide > _WIDTH - _RIGHT:
            x, y = _LEFT, y + 20
        more = "" if colour else _CHAIN
        parts.append(svg.box(x, y - 10, 12, 12, more, fill=colour))
        parts.append(svg.words(x + 18, y, name))
        x += wide
    return parts, y + 8


def _overview(
    timeline: Timeline, window: Window, kinds: Sequence[str], y: float
) -> tuple[list[str], float]:
    """Draw the busy workers by kind over the whole duration, one strip per rank."""
    scale = _Scale(0.0, timeline.timing.makespan)
    parts = [svg.words(_LEFT, y + 12, "The whole program: busy workers", 13, bold=True)]
    top = y + 12 + _TICK_ROOM + 4
    workers = len(timeline.tracks) // timeline.program.ranks
    ranks = timeline.program.ranks
    bottom = top + ranks * _STRIP + (ranks - 1) * _STRIP_GAP
    parts += _axis(scale, top - 6, bottom)
    for rank in range(ranks):
        place = top + rank * (_STRIP + _STRIP_GAP)
        tracks = range(rank * workers, (rank + 1) * workers)
        shape = (scale.x(0), place, scale.x(scale.stop) - scale.x(0), float(_STRIP))
        parts += occupancy(timeline, tracks, kinds, shape)
        name = f"rank {rank}" if ranks > 1 else f"{workers} workers"
        parts.append(_label(place + _STRIP / 2 + 4, name))
    shown = top + window.rows // workers * (_STRIP + _STRIP_GAP) - _STRIP_GAP
    high = max(shown, top + _STRIP) - top
    outline = f'fill="none" stroke="{svg.INK}" stroke-width="1.5" stroke-dasharray="5 3"'
    x = scale.x(window.start)
    wide = scale.x(window.stop) - x
    parts.append(svg.box(x - 2, top - 2, wide + 4, high + 4, outline))
    return parts, bottom + 12


def _axis(scale: _Scale, top: float, bottom: float) -> Iterator[str]:
    """Draw ticks above the rows, and vertical lines through the rows."""
    for moment in svg.ticks(scale.start, scale.stop, _TICKS):
        x = scale.x(moment)
        yield svg.line(x, top, bottom)
        yield svg.words(x, top - 4, f"{moment:,.10g} µs", 11, anchor="middle", fill=svg.QUIET)


def _layers(timeline: Timeline, scale: _Scale, y: float) -> Iterator[str]:
    """Mark the start of each layer. Skip layers whose names would overlap."""
    begins: dict[int, float] = {}
    for number, instruction in enumerate(timeline.program.instructions):
        layer = layer_of(instruction)
        if layer is not None:
            start = timeline.timing.starts[number]
            begins[layer] = min(begins.get(layer, start), start)
    free = 0.0
    for layer, start in sorted(begins.items()):
        name = f"layer {layer}"
        x, wide = scale.x(start), svg.text_width(name, 10)
        if scale.start <= start < scale.stop and x >= free and x + wide <= _WIDTH - _RIGHT:
            yield svg.line(x, y - 9, y + 3, svg.QUIET)
            yield svg.words(x + 3, y, name, 10, fill=svg.QUIET)
            free = x + wide + 12


def _rows(timeline: Timeline, window: Window, y: float) -> list[_Row]:
    height = 26.0 if window.rows <= 16 else 14.0 if window.rows <= 48 else 10.0
    rows: list[_Row] = []
    for number in range(window.rows):
        track = timeline.tracks[number]
        if track.worker == 0 and timeline.program.ranks > 1:
            y += _RANK_GAP
        rows.append(_Row(number, y, height))
        y += height
    return rows


def _names(timeline: Timeline, rows: Sequence[_Row]) -> Iterator[str]:
    """Draw the name of every worker, smaller in narrow rows."""
    for row in rows:
        track = timeline.tracks[row.track]
        if track.worker == 0 and timeline.program.ranks > 1:
            yield svg.words(_LEFT, row.top - 6, f"rank {track.rank}", 12, bold=True)
        size = min(11.0, row.height - 1)
        yield _label(row.top + row.height / 2 + 0.36 * size, f"worker {track.worker}", size)


def _label(y: float, text: str, size: float = 11) -> str:
    return svg.words(_LEFT - 8, y, text, size, anchor="end", fill=svg.QUIET)


def _slices(timeline: Timeline, window: Window, rows: Sequence[_Row]) -> Iterator[str]:
    """Draw the slices kind by kind, then the outlines, then the labels."""
    scale = _Scale(window.start, window.stop)
    starts, finishes = timeline.timing.starts, timeline.timing.finishes
    chain, drawn = set(timeline.chain), dict[str, list[str]]()
    outlined: list[str] = []
    written: list[str] = []
    for row in rows:
        gap = 2.0 if row.height >= 12 else 1.0
        for number in timeline.rows[row.track]:
            if not window.shows(starts[number], finishes[number]):
                continue
            instruction = timeline.program.instructions[number]
            x, end = scale.x(starts[number]), scale.x(finishes[number])
            wide, high = max(end - x, _SMALLEST), row.height - gap
            tooltip = _tooltip(timeline, number)
            drawn.setdefault(instruction.name, []).append(
                svg.box(x, row.top, wide, high, tooltip=tooltip)
            )
            if number in chain:
                outlined.append(svg.box(x + 0.6, row.top + 0.6, max(wide - 1.2, 0.1), high - 1.2))
            words = (instruction.label, instruction.name) if high >= 12 else ()
            fitting = (text for text in words if svg.text_width(text, 10) + 8 <= wide)
            if label := next(fitting, ""):
                written.append(svg.words(x + 4, row.top + high / 2 + 3.5, label, 10))
    edges = f'stroke="{svg.PAPER}" stroke-width="0.5"'
    for kind, boxes in drawn.items():
        yield svg.group(f'fill="{colour_of(kind)}" {edges}', boxes)
    yield svg.group(f'{_CHAIN} pointer-events="none"', outlined)
    yield svg.group('pointer-events="none"', written)


def _tooltip(timeline: Timeline, number: int) -> str:
    timing, early = timeline.timing, timeline.released_by[number]
    start, finish = timing.starts[number], timing.finishes[number]
    instructions = timeline.program.instructions
    lines = [
        instructions[number].label,
        f"{start:,.2f} to {finish:,.2f} µs ({finish - start:,.2f})",
    ]
    if early is not None:
        lines.append(f"waited for {instructions[early].label}")
    return "\n".join(lines)
