"""Linears that round their inputs to int8: the formula, blocks that ranks cut, and mistakes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

import pytest
import torch

from tests.models import relative_error
from tests.rounding import formula, held_parts, made_parts
from tpcompile.backends.torch_tp.functions import linear
from tpcompile.ir.format import Format
from tpcompile.ir.layout import even_runs
from tpcompile.ir.ops import LINEAR, NORM_LINEAR, RMS_NORM, VOCAB_EMBEDDING, few_bits
from tpcompile.ir.ops.few_bits import RoundingWeight, decoded, decoded_rows
from tpcompile.ir.quantize import rounded
from tpcompile.vm.groups import arithmetic
from tpcompile.vm.groups.arithmetic import leaves_of, products
from tpcompile.vm.program.instruction import Range
from tpcompile.vm.program.weight import Weight

NAMES = (
    "int8:row:f32:a8",
    "int8:64:f32:offsets:a8",
    "int8:48:f32:a8",
    "int4:32:f32:a8",
    "int4:row:f32:offsets:a8",
    "int4:192:f32:offsets:a8",
)
COLUMNS, ROWS, TOKENS = 416, 7, 3
"""The columns are neither whole blocks of most formats nor evenly split by three ranks."""
EXACT = 1e-5
Rounding = Callable[..., torch.Tensor]


def inputs(columns: int = COLUMNS) -> torch.Tensor:
    """Return inputs whose magnitude differs from token to token and block to block."""
    generator = torch.Generator().manual_seed(columns)
    sizes = torch.rand(TOKENS, columns // 16 + 1, generator=generator).mul(8).sub(6).exp2()
    x = torch.randn(TOKENS, columns, generator=generator)
    return x * sizes.repeat_interleave(16, 1)[:, :columns]


def edges_of(tp: int) -> list[int]:
    """Return where the columns of ranks begin, multiples of 16 as plans choose them."""
    return [16 * start for ((start, _),) in even_runs(COLUMNS // 16, tp)] + [COLUMNS]


def weights(name: str, tp: int) -> list[RoundingWeight]:
    """Return each rank's columns of a weight, as emitted modules make them."""
    stored, edges = Format.parsed(name), edges_of(tp)
    parts = made_parts(stored, ROWS, COLUMNS)
    rank_weights = []
    for start, stop in pairwise(edges):
        held = held_parts(stored, parts, start, stop)
        weight = decoded(name, list(held.values()), (start, stop), torch.float32)
        assert isinstance(weight, RoundingWeight)
        rank_weights.append(weight)
    return rank_weights


def error(name: str, tp: int) -> float:
    """Return the error of the sum over ranks, computed by modules."""
    x, edges, stored = inputs(), edges_of(tp), Format.parsed(name)
    total = torch.zeros(TOKENS, ROWS)
    for (start, stop), weight in zip(pairwise(edges), weights(name, tp), strict=True):
        total += linear(x[:, start:stop], weight)
    wanted = formula(x, stored, made_parts(stored, ROWS, COLUMNS), edges[:-1])
    return relative_error(total, wanted)


def program_error(name: str, tp: int) -> float:
    """Return the error of the sum over ranks and leaves, computed by the reference machine."""
    x, stored, leaves = inputs(), Format.parsed(name), leaves_of(tp)
    parts, edges, cuts = made_parts(stored, ROWS, COLUMNS), edges_of(tp), list[int]()
    total = torch.zeros(TOKENS, ROWS)
    for start, stop in pairwise(edges):
        weight = Weight(stored, held_parts(stored, parts, start, stop), (start, stop))
        total += products(x[:, start:stop], weight, Range(0, ROWS), leaves=leaves)
        widths = [last - first for ((first, last),) in even_runs(stop - start, leaves)]
        cuts += [start + before for before in accumulate(widths[:-1], initial=0)]
    return relative_error(total, formula(x, stored, parts, cuts))


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_products_are_those_of_the_formula(name: str, tp: int) -> None:
    assert error(name, tp) < EXACT
    assert program_error(name, tp) < EXACT


def whole_row(x: torch.Tensor, stored: Format, first: int = 0) -> torch.Tensor:
    """Make the mistake of one scale for all columns."""
    most = x.abs().amax(-1, keepdim=True)
    return (x * (127 / most)).round() * (most / 127)


def neighbours(x: torch.Tensor, stored: Format, first: int = 0) -> torch.Tensor:
    """Make the mistake of the scale of the block before, which is that of ones for the first."""
    runs = rounded(x, stored, first).split(stored.block, -1)
    sizes = [run.abs().amax(-1, keepdim=True) for run in (torch.ones(1, 1), *runs)]
    scaled = [run * sizes[n] / sizes[n + 1] for n, run in enumerate(runs)]
    return torch.cat(scaled, -1)


def own_columns(x: torch.Tensor, stored: Format, first: int = 0) -> torch.Tensor:
    """Make the mistake of blocks that begin with the columns of a rank."""
    return rounded(x, stored, 0)


WRONG: list[tuple[Rounding, int]] = [(whole_row, 1), (neighbours, 1), (own_columns, 3)]


@pytest.mark.parametrize(("wrong", "tp"), WRONG)
@pytest.mark.parametrize("name", ["int8:64:f32:offsets:a8", "int4:row:f32:offsets:a8"])
def test_other_blocks_are_seen(
    name: str, wrong: Rounding, tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (few_bits, arithmetic):
        monkeypatch.setattr(module, "rounded", wrong)
    assert error(name, tp) > 100 * EXACT
    assert program_error(name, tp) > 100 * EXACT


@pytest.mark.parametrize("name", [name for name in NAMES if "offsets" in name])
def test_forgotten_offsets_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Format.decoded

    def without(stored: Format, parts: dict[str, torch.Tensor], *options: object) -> torch.Tensor:
        forgotten = {**parts, "_zero_point": torch.zeros_like(parts["_zero_point"])}
        return right(stored, forgotten, *options)  # type: ignore[arg-type]

    monkeypatch.setattr(Format, "decoded", without)
    assert error(name, 2) > 100 * EXACT
    assert program_error(name, 2) > 100 * EXACT


@pytest.mark.parametrize("first", [0, 16, 112])
def test_rounded_inputs(first: int) -> None:
    """Ties go to even integers; zeros, and values below the smallest scale, become zeros."""
    stored = Format.parsed("int8:row:f32:a8")
    x = torch.zeros(2, 256)
    x[0, 0], x[0, 1:5] = 127.0, torch.tensor([0.5, -1.5, 2.5, 0.4])
    x[1, 128:] = 1e-39
    wanted = torch.zeros(2, 256)
    wanted[0, :5] = torch.tensor([127.0, 0.0, -2.0, 2.0, 0.0])
    assert torch.equal(rounded(x, stored, first), wanted)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_values_that_are_not_finite(value: float) -> None:
    """They reach all results of their token, and no other token."""
    x = inputs()
    x[1, 70] = value
    (weight,) = weights("int8:64:f32:offsets:a8", 1)
    blocks = rounded(x, weight.format).isnan()
    assert blocks[1, 64:128].all()
    assert blocks.sum() == 64
    assert linear(x, weight).isnan().all(1).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_rounded_once(dtype: torch.dtype) -> None:
    """Weights stay exact, and the result is rounded after the bias."""
    (weight,) = weights("int8:row:f32:a8", 1)
    x, bias = inputs().to(dtype), torch.linspace(-1, 1, ROWS).to(dtype)
    output, exact = linear(x, weight, bias), linear(x.float(), weight, bias.float())
    assert output.dtype == dtype
    assert torch.equal(output, exact.to(dtype))


def test_ops_take_such_weights() -> None:
    """A linear, and a fused op whose body contains one."""
    x, (weight,) = inputs(), weights("int4:32:f32:a8", 1)
    bias, norm = torch.ones(ROWS), torch.linspace(0.5, 2, COLUMNS)
    assert torch.equal(LINEAR(x, weight, bias), weight.linear(x, bias))
    assert torch.equal(LINEAR(x, weight), weight.linear(x))
    normed = RMS_NORM(x, norm, 1e-6)
    assert torch.equal(NORM_LINEAR(x, norm, 1e-6, weight, bias), weight.linear(normed, bias))


@pytest.mark.parametrize("name", ["int8:64:f32:offsets", "int4:32:f32", "int4:row:f32:a8"])
def test_rows_of_a_table(name: str) -> None:
    """Ids of the rows of other ranks give zeros."""
    stored, ids = Format.parsed(name), torch.tensor([2, 9, 4, 3, 0, 4])
    parts = list(held_parts(stored, made_parts(stored, ROWS, COLUMNS), 0, COLUMNS).values())
    whole, dtype = (0, COLUMNS), torch.bfloat16
    plain = str(stored.rounding(False))
    table = decoded(plain, parts, whole, dtype)
    assert isinstance(table, torch.Tensor)
    wanted = VOCAB_EMBEDDING(table, ids, 2)
    assert torch.equal(decoded_rows(name, parts, whole, dtype, ids, 2), wanted)
    assert torch.equal(VOCAB_EMBEDDING(decoded(name, parts, whole, dtype), ids, 2), wanted)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_leaves_round_the_same_blocks_on_any_number_of_ranks(tp: int) -> None:
    """Leaves cut blocks, so that ranks which hold whole leaves come to the same bits."""
    stored, x = Format.parsed("int8:64:f32:a8"), inputs()
    parts, rows = made_parts(stored, ROWS, COLUMNS), Range(0, ROWS)
    whole = Weight(stored, held_parts(stored, parts, 0, COLUMNS), (0, COLUMNS))
    level, edges = [], [start for ((start, _),) in even_runs(COLUMNS, tp)] + [COLUMNS]
    for start, stop in pairwise(edges):
        shard = Weight(stored, held_parts(stored, parts, start, stop), (start, stop))
        level.append(products(x[:, start:stop], shard, rows, leaves=8 // tp))
        columns = Range(start, stop)
        split = products(x[:, start:stop], whole, rows, columns, 8 // tp)
        assert torch.equal(split, level[-1])
    while len(level) > 1:
        level = [a + b for a, b in zip(level[::2], level[1::2], strict=True)]
    assert torch.equal(level[0], products(x, whole, rows, leaves=8))
