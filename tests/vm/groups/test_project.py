"""Projections onto the residual have the same bits for any number of workers and ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.vm.groups.desk import Desk, cuts, near, random, unknown
from tpcompile.ir.layout import even_runs
from tpcompile.ir.ops.decode.residual import all_reduce_residual, linear_residual
from tpcompile.vm.groups import AllReduce, LinearResidual, LinearTerms
from tpcompile.vm.groups.arithmetic import LEAVES, leaves_of
from tpcompile.vm.groups.project import ProjectOperands
from tpcompile.vm.groups.reduce import SumOperands
from tpcompile.vm.groups.residual import Site
from tpcompile.vm.program import Format
from tpcompile.vm.program.instruction import Range

BATCH, ROWS, COLUMNS = 2, 11, 27
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
BIAS = pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])


class Work:
    """A projection on one rank or split over several."""

    def __init__(
        self, dtype: torch.dtype = torch.float32, biased: bool = True, seed: int = 0
    ) -> None:
        self.x = random(BATCH, COLUMNS, seed=seed, dtype=dtype)
        self.weight = random(ROWS, COLUMNS, seed=seed + 1, dtype=dtype)
        self.bias = random(ROWS, seed=seed + 2, dtype=dtype) if biased else None
        self.residual = random(BATCH, ROWS, seed=seed + 3, dtype=dtype)
        self.dtype = dtype

    def alone(self, rows: Sequence[Range] = ()) -> torch.Tensor:
        """Run on one rank, with all columns."""
        desk = Desk()
        operands = ProjectOperands(
            rank=0,
            layer=0,
            site=Site.ATTENTION,
            x=desk.put(self.x),
            weight=desk.put(self.weight),
            bias=desk.put(self.bias),
            residual=desk.put(self.residual),
            out=desk.put(unknown(BATCH, ROWS, dtype=self.dtype)),
            batch=BATCH,
            width=COLUMNS,
            leaves=LEAVES,
            format=Format.of(torch.float32),
        )
        desk.run([LinearResidual(operands, part) for part in rows or [Range(0, ROWS)]])
        output = desk.tensors[operands.out]
        reported = desk.seen("attention_residual", BATCH, ROWS)
        assert torch.equal(reported.to(self.dtype), output), (
            "the reported values are the written ones"
        )
        return output

    def shared(
        self,
        ranks: int,
        splits: int = 1,
        rows: Sequence[Range] = (),
        columns: Sequence[Range] = (),
        leaves: int | None = None,
    ) -> list[torch.Tensor]:
        """Run on several ranks, each with a run of columns in splits; return each rank's result."""
        desk, leaves = Desk(), leaves or leaves_of(ranks)
        held = [run for (run,) in even_runs(COLUMNS, ranks)]
        if COLUMNS % ranks and ranks * leaves == LEAVES:  # whole leaves, as in lowering
            edges = [run[0] for (run,) in even_runs(COLUMNS, LEAVES)] + [COLUMNS]
            held = [(edges[r * leaves], edges[(r + 1) * leaves]) for r in range(ranks)]
        terms = [desk.put(unknown(splits * BATCH, ROWS)) for _ in range(ranks)]
        for rank, (start, stop) in enumerate(held):
            operands = ProjectOperands(
                rank=rank,
                layer=0,
                site=Site.MLP,
                x=desk.put(self.x[:, start:stop]),
                weight=desk.put(self.weight[:, start:stop]),
                bias=-1,
                residual=-1,
                out=terms[rank],
                batch=BATCH,
                width=stop - start,
                leaves=leaves,
                format=Format.of(torch.float32),
            )
            edges = [run[0] for (run,) in even_runs(stop - start, leaves)] + [stop - start]
            split_leaves = leaves // splits
            for slot in range(splits):
                part = Range(edges[slot * split_leaves], edges[(slot + 1) * split_leaves])
                desk.run(
                    [
                        LinearTerms(operands, r, part, slot, split_leaves)
                        for r in rows or [Range(0, ROWS)]
                    ]
                )
        return [self._sum(desk, rank, terms, splits, columns) for rank in range(ranks)]

    def _sum(
        self, desk: Desk, rank: int, terms: list[int], splits: int, columns: Sequence[Range]
    ) -> torch.Tensor:
        operands = SumOperands(
            rank=rank,
            layer=0,
            site=Site.MLP,
            terms=terms[0],
            ranks=len(terms),
            slots=splits,
            bias=desk.put(self.bias),
            residual=desk.put(self.residual),
            out=desk.put(unknown(BATCH, ROWS, dtype=self.dtype)),
            batch=BATCH,
        )
        desk.shown.clear()
        desk.run([AllReduce(operands, part) for part in columns or [Range(0, ROWS)]])
        output = desk.tensors[operands.out]
        assert torch.equal(desk.seen("mlp_residual", BATCH, ROWS).to(self.dtype), output)
        return output

    def expected(self) -> torch.Tensor:
        return linear_residual(self.x, self.weight, self.bias, self.residual)


@BIAS
def test_as_the_op(biased: bool) -> None:
    work = Work(biased=biased)
    assert near(work.alone(), work.expected())
    for ranks in (1, 2, 3, 5):
        for output in work.shared(ranks):
            assert near(output, work.expected())


@BIAS
def test_ranks_as_the_op_of_ranks(biased: bool) -> None:
    """Trap 6: residual and bias are added once, on any number of ranks."""
    work = Work(biased=biased)
    partial = torch.nn.functional.linear(work.x, work.weight)
    expected = all_reduce_residual(partial, work.residual, work.bias)
    for output in work.shared(4):
        assert near(output, expected)


@DTYPES
@BIAS
@pytest.mark.parametrize("edges", [(4,), (1, 2, 9), tuple(range(1, ROWS))], ids=str)
def test_the_same_bits_for_any_rows(
    dtype: torch.dtype, biased: bool, edges: tuple[int, ...]
) -> None:
    work = Work(dtype, biased)
    assert torch.equal(work.alone(cuts(ROWS, *edges)), work.alone())
    rows, columns = cuts(ROWS, *edges), cuts(ROWS, 5)
    whole = work.shared(2, 2)
    for output in work.shared(2, 2, rows, columns):
        assert torch.equal(output, whole[0])


@DTYPES
@BIAS
@pytest.mark.parametrize("splits", [1, 2, 4, 8])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_same_bits_for_any_split_and_any_power_of_two_ranks(
    ranks: int, splits: int, biased: bool, dtype: torch.dtype
) -> None:
    if splits > leaves_of(ranks):
        return
    work = Work(dtype, biased)
    for output in work.shared(ranks, splits):
        assert torch.equal(output, work.alone())


@pytest.mark.parametrize("ranks", [2, 3, 5, 7])
def test_all_ranks_come_to_the_same_bits(ranks: int) -> None:
    first, *others = Work().shared(ranks)
    assert all(torch.equal(first, other) for other in others)


@BIAS
def test_bf16_is_rounded_once(biased: bool) -> None:
    """Trap 20: the error relative to fp32 is at most that of the op in bf16."""
    work = Work(torch.bfloat16, biased)
    wide = [None if t is None else t.double() for t in (work.x, work.weight, work.bias)]
    truth = linear_residual(*wide, work.residual.double())  # type: ignore[arg-type]
    allowed = (work.expected().double() - truth).abs().mean()
    for output in (work.alone(), *work.shared(2)):
        assert (output.double() - truth).abs().mean() <= allowed


def test_trap_6_a_bias_on_every_rank() -> None:
    work = Work()
    right = work.shared(3)[0]
    assert work.bias is not None
    work.bias = 3 * work.bias
    assert not near(work.shared(3)[0], right)


def test_trap_2_columns_in_another_order() -> None:
    work = Work()
    right = work.expected()
    work.weight = work.weight.flip(1)
    assert not near(work.alone(), right)
    assert not near(work.shared(2)[0], right)


def test_terms_in_each_others_place_are_seen() -> None:
    """Two splits that write the same slot are detected, since the other slot stays NaN."""
    work, desk = Work(), Desk()
    operands = ProjectOperands(
        0, 0, Site.MLP, desk.put(work.x), desk.put(work.weight), -1, -1,
        desk.put(unknown(2 * BATCH, ROWS)), BATCH, COLUMNS, LEAVES, 4,
    )  # fmt: skip
    first, second = cuts(COLUMNS, 16)
    rows = Range(0, ROWS)
    desk.run([LinearTerms(operands, rows, part, 0, 4) for part in (first, second)])
    total = SumOperands(
        0, 0, Site.MLP, operands.out, 1, 2, -1, -1, desk.put(unknown(BATCH, ROWS)), BATCH
    )
    desk.run([AllReduce(total, rows)])
    assert desk.tensors[total.out].isnan().all()


def test_without_a_residual_it_is_the_sum() -> None:
    """Without a residual the result is the sum, as for a vocabulary-parallel embedding."""
    desk = Desk()
    terms = [desk.put(random(BATCH, ROWS, seed=seed)) for seed in range(3)]
    out = desk.put(unknown(BATCH, ROWS))
    operands = SumOperands(0, -1, Site.EMBEDDING, terms[0], 3, 1, -1, -1, out, BATCH)
    desk.run([AllReduce(operands, Range(0, ROWS))])
    first, second, third = (desk.tensors[number] for number in terms)
    assert torch.equal(desk.tensors[out], (first + second) + third)
    assert {name for name, *_ in desk.shown} == {"embedding"}
