"""Tests of registries: lookup, suggestions, and duplicate names."""

from __future__ import annotations

import pytest

from tpcompile.errors import UsageError
from tpcompile.registry import Registry


def _colours() -> Registry[int]:
    colours: Registry[int] = Registry("colour")
    colours.add("red", 1)
    colours.add("turquoise", 2)
    return colours


def test_entries_keep_their_order() -> None:
    colours = _colours()
    assert dict(colours) == {"red": 1, "turquoise": 2}
    assert list(colours) == ["red", "turquoise"]
    assert "red" in colours and "blue" not in colours
    assert len(colours) == 2


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"Unknown colour 'turqois'\. Did you mean turquoise\?"):
        _colours()["turqois"]


def test_names_are_found_in_any_case() -> None:
    colours = _colours()
    assert colours["Turquoise"] == 2
    assert "RED" in colours and 3 not in colours
    assert colours.spelling("RED") == "red"
    with pytest.raises(UsageError, match=r"Did you mean turquoise\?"):
        colours["TURQOIS"]


def test_a_name_is_taken_once() -> None:
    colours = _colours()
    colours.add("red", colours["red"])
    with pytest.raises(UsageError, match=r"two entries for the colour 'red'.*3 and 1"):
        colours.add("red", 3)
    with pytest.raises(UsageError, match=r"two entries for the colour 'Red'.*3 and 1"):
        colours.add("Red", 3)
