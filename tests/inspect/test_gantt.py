"""The Gantt chart shows each instruction once, in its place and colour; texts do not overlap."""

from __future__ import annotations

from itertools import combinations
from xml.etree import ElementTree

import pytest

from tests.inspect.schedules import CUT, LONG, SHORT, many_kinds, step_timeline
from tpcompile.inspect import svg
from tpcompile.inspect.colours import colour_of
from tpcompile.inspect.gantt import gantt_svg
from tpcompile.inspect.timeline import Timeline
from tpcompile.inspect.window import MOST_SLICES, SLICES_A_ROW, window_of
from tpcompile.vm.program.instruction import Range

Element = ElementTree.Element
Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""

_SVG = "{http://www.w3.org/2000/svg}"


def drawn(timeline: Timeline, title: str = "a title", layers: Range | None = None) -> Element:
    notes = ("a note", "another note " + "that is long " * 30)
    return ElementTree.fromstring(gantt_svg(timeline, title, 12.5, notes, layers))


def slices(root: Element) -> dict[str, Element]:
    """Return the rectangles of instructions by label."""
    rects = {}
    for rect in root.iter(f"{_SVG}rect"):
        tooltip = rect.find(f"{_SVG}title")
        if tooltip is not None:
            assert tooltip.text is not None
            rects[tooltip.text.split("\n")[0]] = rect
    return rects


def box_of(rect: Element) -> Box:
    x, y, wide, high = (float(rect.attrib[side]) for side in ("x", "y", "width", "height"))
    return x, y, x + wide, y + high


def text_box(text: Element) -> Box:
    size, x, y = (float(text.attrib[key]) for key in ("font-size", "x", "y"))
    wide = svg.text_width(text.text or "", size)
    left = x - {"start": 0.0, "middle": wide / 2, "end": wide}[text.attrib["text-anchor"]]
    return left, y - 0.75 * size, left + wide, y + 0.2 * size


def overlap(box: Box, other: Box) -> bool:
    return box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]


@pytest.mark.parametrize("timeline", SHORT)
def test_every_instruction_is_drawn_where_and_when_it_runs(timeline: Timeline) -> None:
    root = drawn(timeline)
    rects = slices(root)
    instructions = timeline.program.instructions
    assert rects.keys() == {i.label for i in instructions}
    scale = (box_of(rects["argmax"])[2] - box_of(rects["embed"])[0]) / timeline.timing.makespan
    left = box_of(rects["embed"])[0]
    for row in timeline.rows:
        boxes = [box_of(rects[instructions[number].label]) for number in row]
        assert len({(top, bottom) for _, top, _, bottom in boxes}) == 1
        for number, (start, _, stop, _) in zip(row, boxes, strict=True):
            assert start == pytest.approx(left + scale * timeline.timing.starts[number], abs=0.2)
            assert stop == pytest.approx(left + scale * timeline.timing.finishes[number], abs=0.2)
    tops = {box_of(rects[instructions[row[0]].label])[1] for row in timeline.rows}
    assert len(tops) == len(timeline.tracks)


def test_colours_are_those_of_the_legend() -> None:
    timeline = SHORT[0]
    root = drawn(timeline)
    kinds = dict.fromkeys(instruction.name for instruction in timeline.program.instructions)
    rects = slices(root)
    groups = {group.attrib.get("fill"): set(group) for group in root.iter(f"{_SVG}g")}
    for instruction in timeline.program.instructions:
        assert rects[instruction.label] in groups[colour_of(instruction.name)]
    words = [text.text for text in root.iter(f"{_SVG}text")]
    assert set(kinds) <= set(words)


def test_what_the_end_waited_for_is_outlined() -> None:
    timeline = SHORT[0]
    root = drawn(timeline)
    group = next(g for g in root.iter(f"{_SVG}g") if g.attrib.get("fill") == "none")
    outlines = [box_of(rect) for rect in group]
    rects = slices(root)
    chain = [timeline.program.instructions[number].label for number in timeline.chain]
    assert len(outlines) == len(chain)
    for label in chain:
        left, top, right, bottom = box_of(rects[label])
        inner = (left + 0.6, top + 0.6, right - 0.6, bottom - 0.6)
        assert any(o == pytest.approx(inner, abs=0.2) for o in outlines)


@pytest.mark.parametrize(
    ("timeline", "layers"),
    [
        *((timeline, None) for timeline in (*SHORT, *LONG, many_kinds(), CUT)),
        *((timeline, Range(1, 2)) for timeline in (*SHORT, *LONG)),
    ],
)
@pytest.mark.parametrize("title", ["a title", "preset:tiny <long> & " * 20])
def test_words_stand_clear(timeline: Timeline, layers: Range | None, title: str) -> None:
    root = drawn(timeline, title, layers)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    boxes = [(text.text, text_box(text)) for text in root.iter(f"{_SVG}text")]
    for label, (left, top, right, bottom) in boxes:
        assert left >= 0 and top >= 0 and right <= width and bottom <= height, label
    for (text, first), (other, second) in combinations(boxes, 2):
        assert not overlap(first, second), (text, other)
    inside = [box_of(rect) for rect in slices(root).values()]
    for label, box in boxes:
        for left, top, right, bottom in inside:
            if overlap(box, (left, top, right, bottom)):
                assert left <= box[0] and box[2] <= right and top <= box[1], label


def test_figures() -> None:
    timeline = SHORT[0]
    words = [text.text or "" for text in drawn(timeline).iter(f"{_SVG}text")]
    assert words[0] == "a title"
    for figure in (
        "30 instructions",
        "3 workers",
        f"{timeline.program.counters} counters",
        f"makespan {timeline.timing.makespan:.1f} µs",
        "critical path 12.5 µs",
        f"idle {100 * timeline.idle:.1f} %",
    ):
        assert figure in words[1].split(" · ")
    assert {"worker 0", "worker 1", "worker 2", "0 µs", "5 µs", "20 µs"} <= set(words)


@pytest.mark.parametrize("workers", [3, 20, 60, 132])
def test_every_worker_has_a_name(workers: int) -> None:
    """Each name is beside its row, and only there."""
    timeline = step_timeline(2, workers, "round-robin")
    root = drawn(timeline)
    names = {
        text.text: text_box(text)
        for text in root.iter(f"{_SVG}text")
        if (text.text or "").startswith("worker ")
    }
    assert list(names) == [f"worker {number}" for number in range(workers)]
    rects = slices(root)
    for row, (_, top, _, bottom) in zip(timeline.rows, names.values(), strict=True):
        for number in row:
            box = box_of(rects[timeline.program.instructions[number].label])
            assert box[1] - 1 <= top and bottom <= box[3] + 2


@pytest.mark.parametrize("timeline", [SHORT[0], LONG[0], LONG[2]])
def test_chosen_layers(timeline: Timeline) -> None:
    """The slices are those of the time of the layers, cut off where it begins and ends."""
    root = drawn(timeline, layers=Range(1, 3) if timeline is not SHORT[0] else Range(1, 2))
    window = window_of(timeline, Range(1, 3) if timeline is not SHORT[0] else Range(1, 2))
    starts, finishes = timeline.timing.starts, timeline.timing.finishes
    instructions = timeline.program.instructions
    shown = {n for row in timeline.rows[: window.rows] for n in row}
    inside = {n for n in shown if starts[n] < window.stop and finishes[n] > window.start}
    rects = slices(root)
    assert rects.keys() == {instructions[n].label for n in inside}
    left = min(box_of(rect)[0] for rect in rects.values())
    right = max(box_of(rect)[2] for rect in rects.values())
    scale = (right - left) / (window.stop - window.start)
    for n in inside:
        x, _, end, _ = box_of(rects[instructions[n].label])
        assert x == pytest.approx(left + scale * max(starts[n] - window.start, 0), abs=0.3)
        assert end == pytest.approx(
            left + scale * (min(finishes[n], window.stop) - window.start), abs=0.5
        )
    words = [text.text or "" for text in root.iter(f"{_SVG}text")]
    assert f"Shown below: {window.description}" in words
    assert "layer 1" in words and "layer 0" not in words


def test_notes_are_below_the_figures() -> None:
    words = [text.text or "" for text in drawn(SHORT[0]).iter(f"{_SVG}text")]
    assert words[2] == "a note"
    assert words[3].startswith("another note") and words[3].endswith("…")


def test_a_tooltip_tells_when_and_after_what() -> None:
    timeline = SHORT[0]
    tooltips = [t.text or "" for t in drawn(timeline).iter(f"{_SVG}title")]
    assert "layer 0 qkv <2>\n0.50 to 2.50 µs (2.00)\nwaited for embed" in tooltips
    assert "embed\n0.00 to 0.50 µs (0.50)" in tooltips


@pytest.mark.parametrize("timeline", [*LONG, CUT])
def test_of_a_long_program_the_first_layers(timeline: Timeline) -> None:
    window = window_of(timeline)
    text = gantt_svg(timeline, "long", 1.0)
    assert len(text.encode()) < 2_000_000
    root = ElementTree.fromstring(text)
    by_label = slices(root)
    assert 0 < len(by_label) <= min(MOST_SLICES, SLICES_A_ROW * window.rows)
    shown = {n for row in timeline.rows[: window.rows] for n in row}
    instructions = timeline.program.instructions
    starts = timeline.timing.starts
    assert by_label.keys() == {instructions[n].label for n in shown if starts[n] < window.stop}
    words = [t.text or "" for t in root.iter(f"{_SVG}text")]
    assert f"Shown below: {window.description}" in words
    assert "The whole program: busy workers" in words
    ends = max(box_of(rect)[2] for rect in by_label.values())
    rects = list(root.iter(f"{_SVG}rect"))
    strips = [box_of(rect)[2] for rect in rects if rect.attrib.get("stroke") == svg.GRID]
    assert ends <= strips[0] + 0.2, "bars that continue are cut where the overview ends"
