"""The list of tests of which only some cases run by default."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.thinned import ONE_IN, left_out
from tpcompile.backends.native.build import path_of_kernels, paths

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("function", ONE_IN)
def test_a_name_is_that_of_a_test(function: str) -> None:
    file, name = function.split("::")
    nodes = ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
    assert name in {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


class _Item:
    """A case of a test, of which only the name and the parameters are read."""

    def __init__(self, nodeid: str, **parameters: object) -> None:
        self.nodeid = nodeid
        self.callspec = SimpleNamespace(params=parameters)

    def get_closest_marker(self, name: str) -> None:
        return None


@pytest.mark.parametrize("period", [2, 3, 4, 6])
def test_each_value_of_each_parameter_occurs(monkeypatch: pytest.MonkeyPatch, period: int) -> None:
    """Cases that run follow no period of the parameters."""
    monkeypatch.setitem(ONE_IN, "test_cases", 3)
    items = [_Item(f"test_cases[{number}]") for number in range(10 * period)]
    items.append(_Item("test_others[0]"))
    skipped = {id(item) for item in left_out(items)}  # type: ignore[arg-type]
    numbers = [number for number, item in enumerate(items) if id(item) not in skipped]
    assert numbers[0] == 0 and numbers[-1] == 10 * period
    assert {number % period for number in numbers[:-1]} == set(range(period))
    assert 3 * period <= len(numbers) - 1 <= 4 * period


def test_values_that_several_cases_have_all_occur(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are no reason to run a case: each of many cases may have a number of its own."""
    monkeypatch.setitem(ONE_IN, "test_cases", 9)
    items = [
        _Item(f"test_cases[{number}]", model=number % 3, path=number // 6, seed=number)
        for number in range(12)
    ]
    skipped = list(left_out(items))  # type: ignore[arg-type]
    parameters = [item.callspec.params for item in items if item not in skipped]
    assert {values["model"] for values in parameters} == {0, 1, 2}
    assert {values["path"] for values in parameters} == {0, 1}
    assert [values["seed"] for values in parameters] == [0, 1, 5, 6]


def test_paths_that_share_kernels_run_once() -> None:
    items = [
        _Item(f"test_kernels[{path}-{dtype}]", path=path, dtype=dtype)
        for path in ("avx512_bf16", "avx512_vnni")
        for dtype in (torch.bfloat16, torch.float32)
    ]
    skipped = [item.nodeid for item in left_out(items)]  # type: ignore[arg-type]
    assert skipped == ["test_kernels[avx512_bf16-torch.float32]"]


def test_kernels_of_fp16_run_on_one_path() -> None:
    items = [_Item("test_kernels", path=path, dtype=torch.float16) for path in paths()]
    skipped = {item.callspec.params["path"] for item in left_out(items)}  # type: ignore[arg-type]
    assert set(paths()) - skipped == {path_of_kernels(paths()[0], torch.float16)}
