"""Every kind of instruction has one colour of its own, on which black text is legible."""

from __future__ import annotations

from itertools import combinations

import tpcompile.vm.groups  # noqa: F401  (registers the instructions)
from tpcompile.inspect.colours import COLOURS, OTHERS, colour_of
from tpcompile.inspect.svg import INK
from tpcompile.vm.program.instruction_set import INSTRUCTIONS


def test_every_kind_has_a_colour() -> None:
    names = [name for name in INSTRUCTIONS if INSTRUCTIONS[name].opcode < 256]
    assert list(COLOURS) == names
    assert [colour_of(name) for name in names] == list(COLOURS.values())


def test_colours_differ_and_black_can_be_read_on_them() -> None:
    colours = [*COLOURS.values(), *OTHERS]
    for colour in colours:
        assert contrast(colour, INK) > 5
    for left, right in combinations(colours, 2):
        apart = sum(abs(a - b) for a, b in zip(channels(left), channels(right), strict=True))
        assert apart > 60, (left, right)


def test_the_colour_of_another_kind_depends_on_its_name() -> None:
    assert colour_of("scaled_embed") == colour_of("scaled_embed") in OTHERS
    assert {colour_of(f"kind_{number}") for number in range(40)} == set(OTHERS)


def channels(colour: str) -> list[int]:
    return [int(colour[place : place + 2], 16) for place in (1, 3, 5)]


def contrast(colour: str, other: str) -> float:
    """Return the contrast ratio as defined by the Web Content Accessibility Guidelines."""
    light, dark = sorted((luminance(colour), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [value / 255 for value in channels(colour)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
