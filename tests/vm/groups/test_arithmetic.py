"""Results depend on the numbers alone, not on the worker, the block or the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpcompile.ir.layout import even_runs
from tpcompile.ir.ops.collectives import fold_tree
from tpcompile.vm.groups import arithmetic
from tpcompile.vm.groups.arithmetic import (
    LEAVES,
    dots,
    exp,
    leaf_dots,
    leaves_of,
    log,
    rms_norm,
    swiglu,
    total,
)

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=70))
def test_a_sum_is_that_tree(terms: list[float]) -> None:
    level = [torch.tensor(term) for term in terms]
    while len(level) > 1:
        half = (len(level) + 1) // 2
        folded = [a + b for a, b in zip(level[:half], level[half:], strict=False)]
        level = folded + level[len(folded) : half]
    assert torch.equal(total(torch.tensor(terms)), level[0])


@given(st.integers(1, 70), st.integers(1, 5))
def test_a_sum_does_not_see_the_others(width: int, rows: int) -> None:
    terms = random(rows, 3, width)
    before = terms.clone()
    sums = total(terms)
    assert torch.equal(terms, before), "operands are unchanged"
    for row in range(rows):
        for column in range(3):
            assert torch.equal(total(terms[row, column]), sums[row, column])
    strided = terms.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(total(strided), sums)


@DTYPES
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_dot_product_is_the_same_in_any_block(dtype: torch.dtype, data: Any) -> None:
    """A dot product has the same bits in any block and batch, with tails of any length."""
    batch, rows = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    columns = data.draw(st.integers(1, 67))
    x, weight = random(batch, columns, dtype=dtype), random(rows, columns, seed=1, dtype=dtype)
    whole = dots(x, weight)
    assert whole.dtype == torch.float32
    start = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(start + 1, rows))
    row = data.draw(st.integers(0, batch - 1))
    assert torch.equal(dots(x, weight[start:stop]), whole[:, start:stop])
    assert torch.equal(dots(x[row : row + 1], weight), whole[row : row + 1])
    wide = torch.cat([random(rows, 5, dtype=dtype), weight, random(rows, 3, dtype=dtype)], 1)
    assert torch.equal(dots(x, wide[:, 5 : 5 + columns]), whole), "at any position"


@settings(max_examples=60, deadline=None)
@given(st.integers(LEAVES, 90), st.sampled_from([1, 2, 4, 8]))
def test_leaves_are_the_same_however_many_share_them(columns: int, parts: int) -> None:
    """Leaves have the same bits in one instruction and in several, added in the tree."""
    x, weight = random(2, columns), random(5, columns, seed=1)
    whole = fold_tree(leaf_dots(x, weight, LEAVES), torch.add)
    edges = [run[0] for (run,) in even_runs(columns, LEAVES)] + [columns]
    leaves = LEAVES // parts
    level = []
    for part in range(parts):
        start, stop = edges[part * leaves], edges[(part + 1) * leaves]
        products = leaf_dots(x[:, start:stop], weight[:, start:stop], leaves)
        level.append(fold_tree(products, torch.add))
    while len(level) > 1:
        level = [a + b for a, b in zip(level[::2], level[1::2], strict=True)]
    assert torch.equal(level[0], whole)


@pytest.mark.parametrize("ranks", range(1, 17))
def test_ranks_have_a_power_of_two_of_leaves(ranks: int) -> None:
    leaves = leaves_of(ranks)
    assert leaves & (leaves - 1) == 0
    assert leaves * ranks <= LEAVES or leaves == 1
    if LEAVES % ranks == 0:
        assert leaves * ranks == LEAVES
    assert [leaves_of(1, width) for width in (1, 2, 3, 5, LEAVES, 99)] == [
        1,
        2,
        2,
        4,
        LEAVES,
        LEAVES,
    ]


@pytest.mark.parametrize("function", [exp, log], ids=["exp", "log"])
@settings(deadline=None)
@given(data=st.data())
def test_a_function_is_the_same_in_any_lane(function: Any, data: Any) -> None:
    values = data.draw(st.lists(st.floats(2**-10, 80, width=32), min_size=1, max_size=37))
    whole = function(torch.tensor(values))
    singles = [function(torch.tensor([value])) for value in values]
    assert torch.equal(whole, torch.cat(singles))


def test_the_ends_of_exponentials() -> None:
    assert exp(torch.tensor([-torch.inf, 0.0, -200.0])).tolist() == [0, 1, 0]
    assert log(torch.tensor([1.0])).item() == 0


@DTYPES
def test_a_norm_is_that_of_each_row_alone(dtype: torch.dtype) -> None:
    x, weight = random(4, 3, 20, dtype=dtype), random(20, seed=1, dtype=dtype)
    whole = rms_norm(x, weight, 1e-6)
    assert whole.dtype == dtype
    for row in range(4):
        assert torch.equal(rms_norm(x[row, 1], weight, 1e-6), whole[row, 1])
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    limit = 1e-6 if dtype == torch.float32 else 2e-2
    assert torch.allclose(whole.double(), exact * weight.double(), rtol=limit, atol=limit)


@DTYPES
def test_swiglu_is_that_of_each_number_alone(dtype: torch.dtype) -> None:
    gate, up = 30 * random(41, dtype=dtype), random(41, seed=1, dtype=dtype)
    whole = swiglu(gate, up)
    assert whole.dtype == dtype
    assert not whole.isnan().any()
    for place in range(41):
        alone = swiglu(gate[place : place + 1], up[place : place + 1])
        assert torch.equal(alone, whole[place : place + 1])
    exact = torch.nn.functional.silu(gate.double()) * up.double()
    limit = 1e-6 if dtype == torch.float32 else 2e-2
    assert torch.allclose(whole.double(), exact, rtol=limit, atol=limit)


def test_a_librarys_sum_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum whose order depends on the number of rows, as in torch.matmul, is detected."""
    monkeypatch.setattr(
        arithmetic,
        "fold",
        lambda terms: terms.sum(0) if terms.shape[2] > 1 else terms.cumsum(0)[-1],
    )
    x, weight = random(1, 997), random(9, 997, seed=1)
    whole = dots(x, weight)
    alone = torch.cat([dots(x, weight[row : row + 1]) for row in range(9)], 1)
    assert not torch.equal(whole, alone)
