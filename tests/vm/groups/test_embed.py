"""Tests of embedding tokens on one rank and on several."""

from __future__ import annotations

import pytest
import torch

from tests.vm.groups.desk import Desk, cuts, random, unknown, whole_numbers
from tpcompile.vm.groups import AllReduce, Embed
from tpcompile.vm.groups.embed import EmbedOperands
from tpcompile.vm.groups.reduce import SumOperands
from tpcompile.vm.groups.residual import Site
from tpcompile.vm.program import Format
from tpcompile.vm.program.instruction import Range

WIDTH, VOCABULARY, TOKENS = 7, 11, (10, 0, 4, 4)


def embedded(
    firsts: tuple[int, ...], columns: list[Range], dtype: torch.dtype = torch.float32
) -> tuple[Desk, torch.Tensor]:
    """Split the vocabulary at these first tokens; return the desk and the summed embedding."""
    table = random(VOCABULARY, WIDTH, dtype=dtype)
    table[4, 2] = -0.0
    desk, summed = Desk(), len(firsts) > 1
    kind = torch.float32 if summed else dtype
    outs = [desk.put(unknown(len(TOKENS), WIDTH, dtype=kind)) for _ in firsts]
    for rank, (first, last) in enumerate(zip(firsts, (*firsts[1:], VOCABULARY), strict=True)):
        operands = EmbedOperands(
            rank=rank,
            layer=-1,
            tokens=desk.put(whole_numbers(*TOKENS)),
            table=desk.put(table[first:last]),
            out=outs[rank],
            batch=len(TOKENS),
            first=first,
            rows=last - first,
            format=Format.of(torch.float32),
            summed=summed,
        )
        desk.run([Embed(operands, part) for part in columns])
    if not summed:
        return desk, desk.tensors[outs[0]]
    assert not desk.shown, "a partial sum is not reported"
    out = desk.put(unknown(len(TOKENS), WIDTH, dtype=dtype))
    at_sum = SumOperands(0, -1, Site.EMBEDDING, outs[0], len(firsts), 1, -1, -1, out, len(TOKENS))
    desk.run([AllReduce(at_sum, Range(0, WIDTH))])
    return desk, desk.tensors[out]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("firsts", [(0,), (0, 6), (0, 4, 8), (0, 1, 2, 10)], ids=str)
def test_the_rows_of_the_tokens(firsts: tuple[int, ...], dtype: torch.dtype) -> None:
    """The bits agree, except that minus zero becomes zero, as in a sum."""
    for columns in (cuts(WIDTH), cuts(WIDTH, 2, 3)):
        desk, embedding = embedded(firsts, columns, dtype)
        expected = random(VOCABULARY, WIDTH, dtype=dtype)[list(TOKENS)]
        expected[2:, 2] = 0
        assert torch.equal(embedding, expected)
        assert not torch.signbit(embedding[2:, 2]).any()
        assert torch.equal(desk.seen("embedding", len(TOKENS), WIDTH).to(dtype), embedding)


def test_a_first_row_that_is_forgotten() -> None:
    """A rank that ignores its first row looks up wrong tokens."""
    desk, embedding = embedded((0, 6), cuts(WIDTH))
    tokens = whole_numbers(*TOKENS)
    table = desk.put(random(VOCABULARY, WIDTH)[6:])
    out = desk.put(unknown(len(TOKENS), WIDTH))
    operands = EmbedOperands(1, -1, desk.put(tokens), table, out, len(TOKENS), 0, 5, 4, True)
    desk.run([Embed(operands, Range(0, WIDTH))])
    assert not torch.equal(desk.tensors[out][0], embedding[0])
    assert desk.tensors[out][1].any(), "token 0 belongs to the other rank"
