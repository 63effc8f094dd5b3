"""The list of tests of which only some cases run by default."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.thinned import ONE_IN, left_out

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("function", ONE_IN)
def test_a_name_is_that_of_a_test(function: str) -> None:
    file, name = function.split("::")
    found = ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
    assert name in {one.name for one in found if isinstance(one, ast.FunctionDef)}


class _Item:
    """A case of a test, of which only the name is read."""

    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid

    def get_closest_marker(self, name: str) -> None:
        return None


@pytest.mark.parametrize("period", [2, 3, 4, 6])
def test_each_value_of_each_parameter_occurs(monkeypatch: pytest.MonkeyPatch, period: int) -> None:
    """Cases that run follow no period of the parameters."""
    monkeypatch.setitem(ONE_IN, "test_cases", 3)
    items = [_Item(f"test_cases[{number}]") for number in range(10 * period)]
    items.append(_Item("test_others[0]"))
    rest = {id(one) for one in left_out(items)}  # type: ignore[arg-type]
    kept = [number for number, one in enumerate(items) if id(one) not in rest]
    assert kept[0] == 0 and kept[-1] == 10 * period
    assert {number % period for number in kept[:-1]} == set(range(period))
    assert 3 * period <= len(kept) - 1 <= 4 * period
