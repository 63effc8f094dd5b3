"""Attention is multiplied by its gate where its spans are merged."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.passes.decoding import decode_step
from tpcompile.ir.ops import ATTENTION_REDUCE, GATED_ATTENTION_REDUCE, SIGMOID_GATE
from tpcompile.rewriting.rewrite import calls

MODEL, NAME = "tiny-qwen3.5", "fuse-gated-attention"


def test_golden(golden: Callable[[str, str], None]) -> None:
    golden("passes/fuse_gated_attention.txt", decode_step(NAME, MODEL, 1).plain.diff("layer 1"))


def test_matches_every_layer_of_attention_with_gates() -> None:
    current = decode_step(NAME, MODEL).plain
    assert current.matches == 1
    gm = current.after.graph
    assert not calls(gm, SIGMOID_GATE) and not calls(gm, ATTENTION_REDUCE)
    assert len(calls(gm, GATED_ATTENTION_REDUCE)) == 1
    assert decode_step(NAME, "tiny-qwen3").plain.matches == 0


@pytest.mark.parametrize("tp", [1, 2, 3, 5])
def test_numbers(tp: int) -> None:
    decode_step(NAME, MODEL, tp).assert_same_bits()
    decode_step(NAME, MODEL, tp).assert_near()


def test_again() -> None:
    assert decode_step(NAME, MODEL).plain.again().matches == 0
