"""Partials of spans merged by log-sum-exp equal attention."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tpcompile.compare.groups import Group, Pieces
from tpcompile.compare.program.spans import AttentionInput, put_spans
from tpcompile.ir.ops.decode import merge_spans

HEADS, SHARED, WIDTH = 4, 2, 8


@pytest.mark.parametrize("length", [1, 4, 5, 19])
@pytest.mark.parametrize("spans", [1, 2, 3])
@pytest.mark.parametrize("window", [None, 6])
def test_spans_merge_to_attention(length: int, spans: int, window: int | None) -> None:
    torch.manual_seed(length)
    held = length if window is None else min(length, window)
    q = torch.randn(HEADS, WIDTH)
    k, v = torch.randn(2, held, SHARED, WIDTH)
    groups = [
        Group("partial_values", 0, 1, HEADS * spans * WIDTH),
        Group("partial_lse", 0, 1, HEADS * spans),
    ]
    pieces = Pieces("eager", groups)
    put_spans(pieces, 0, [AttentionInput(q, k, v, 0.3)], (length,), spans, 4)
    side = pieces.side()
    values = side.values["partial_values", 0].view(HEADS, spans, WIDTH)
    lse = side.values["partial_lse", 0].view(HEADS, spans)
    mixed, _ = merge_spans(values, lse)
    wide_k, wide_v = (x.repeat_interleave(HEADS // SHARED, 1).transpose(0, 1) for x in (k, v))
    wanted = functional.scaled_dot_product_attention(q[:, None], wide_k, wide_v, scale=0.3)
    assert torch.allclose(mixed, wanted[:, 0], atol=1e-6)
    assert not side.problems
    assert bool((values[lse == -torch.inf] == 0).all())


def test_spans_of_no_tokens_are_empty() -> None:
    attention = AttentionInput(torch.randn(HEADS, WIDTH), *torch.randn(2, 1, SHARED, WIDTH), 0.3)
    sizes = {"partial_values": WIDTH, "partial_lse": 1}
    groups = [Group(name, 0, 1, HEADS * 3 * size) for name, size in sizes.items()]
    pieces = Pieces("eager", groups)
    put_spans(pieces, 0, [attention], (1,), 3, 4)
    lse = pieces.side().values["partial_lse", 0].view(HEADS, 3)
    assert (lse == -torch.inf).tolist() == [[True, True, False]] * HEADS
