"""A parsed graph is checked, and problems cite the lines of the text."""

from __future__ import annotations

import pytest

import tpcompile
from tpcompile.errors import UsageError, VerifyError
from tpcompile.ir.parse import parse_graph

TEXT = """graph small (tp=1)
inputs
  %x = input : f32[T, 8] Replicate
outside of the layers
  %a = aten.silu(%x) : f32[T, 8] Replicate
result
  return %a : f32[T, 8] Replicate
"""


def test_a_type_that_the_operands_do_not_give_is_refused_with_its_line() -> None:
    text = TEXT.replace("silu(%x) : f32[T, 8]", "silu(%x) : f32[T, 9]")
    with pytest.raises(VerifyError, match=r"rule type .*At line 5, %a\. Found f32\[T, 9\]"):
        parse_graph(text)
    assert len(parse_graph(text, check=False).graph.nodes) == 3


def test_the_package_exports_it() -> None:
    assert len(tpcompile.parse_graph(TEXT).graph.nodes) == 3
    with pytest.raises(UsageError, match="parse_graph takes text"):
        tpcompile.parse_graph(b"graph")  # type: ignore[arg-type]
