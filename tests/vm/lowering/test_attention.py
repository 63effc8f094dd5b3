"""Lowering of attention refuses too many spans or slots."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.backends.reference.stepping import BLOCK, Case
from tpcompile.errors import UsageError
from tpcompile.vm.groups import PartialAttention
from tpcompile.vm.lowering import lower


def test_a_block_for_each_span() -> None:
    case = Case("tiny-qwen3", lengths=(1,), spans=3)
    found = lower(case.graph, replace(case.plan, max_seq_len=2 * BLOCK + 1))
    assert {one.span for one in found.instructions if isinstance(one, PartialAttention)} == {
        0,
        1,
        2,
    }
    with pytest.raises(UsageError, match="spans=3 exceeds the 2 blocks of the longest sequence"):
        lower(case.graph, replace(case.plan, max_seq_len=2 * BLOCK))


def test_slots_are_counted_in_whole_blocks() -> None:
    case = Case("tiny-qwen3", lengths=(1,))
    with pytest.raises(UsageError, match="2,147,483,648 slots in the KV cache"):
        lower(case.graph, replace(case.plan, max_seq_len=2**31 - 1))
