"""Work is cut into pieces that are multiples of the grain, one per worker, without overlap."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpcompile.errors import UsageError
from tpcompile.vm.lowering import StepPlan
from tpcompile.vm.program.instruction import Range
from tpcompile.vm.targets import TARGETS

SIZES = st.integers(1, 400)


def _assert_tiles(ranges: list[Range], extent: int) -> None:
    assert [part.stop for part in ranges[:-1]] == [part.start for part in ranges[1:]]
    assert (ranges[0].start, ranges[-1].stop) == (0, extent)
    assert all(part.extent > 0 for part in ranges)


@given(workers=SIZES, grain=st.integers(1, 64), extent=st.integers(1, 20_000))
def test_blocks(workers: int, grain: int, extent: int) -> None:
    blocks = StepPlan(workers, grain=grain).blocks(extent)
    _assert_tiles(blocks, extent)
    units = -(-extent // grain)
    assert len(blocks) <= min(workers, units)
    assert all(block.start % grain == 0 for block in blocks)
    assert max(block.extent for block in blocks) <= -(-units // workers) * grain
    full = [block.extent for block in blocks[:-1]]
    assert max(full, default=0) - min(full, default=0) <= grain


def test_several_blocks_per_worker() -> None:
    """They let work move between workers, so a single worker has one block."""
    plan = StepPlan.on(replace(TARGETS["cpu"], workers=2), batch=3)
    assert (plan.workers, plan.grain, plan.batch, plan.shares) == (2, 16, 3, 8)
    assert len(plan.blocks(1024)) == len(plan.runs(32, 32)) == 8
    assert len(plan.blocks(48)) == 3, "the grain is the limit"
    assert StepPlan(1, blocks_per_worker=4).shares == 1
    assert StepPlan.on(TARGETS["h200"]).shares == TARGETS["h200"].workers


@given(grain=st.integers(1, 64), extents=st.tuples(st.integers(1, 9_999), st.integers(1, 9_999)))
def test_pieces(grain: int, extents: tuple[int, int]) -> None:
    """Different widths can be cut into the same number of pieces."""
    plan = StepPlan(7, grain=grain)
    count = min(len(plan.blocks(extent)) for extent in extents)
    for extent in extents:
        pieces = plan.pieces(extent, count)
        _assert_tiles(pieces, extent)
        assert len(pieces) == count


@given(workers=SIZES, heads=st.integers(1, 64), more=st.integers(0, 64))
def test_runs_of_heads(workers: int, heads: int, more: int) -> None:
    """No run is longer than a worker's share of all heads."""
    runs = StepPlan(workers).runs(heads, heads + more)
    _assert_tiles(runs, heads)
    assert max(run.extent for run in runs) <= -(-(heads + more) // workers)


@given(
    workers=SIZES,
    grain=st.sampled_from([1, 8, 16, 32]),
    width=st.sampled_from([16, 64, 80, 96, 128]),
    heads=st.integers(1, 96),
)
def test_blocks_of_a_head(workers: int, grain: int, width: int, heads: int) -> None:
    """The number of blocks minimises the estimated time."""
    blocks = StepPlan(workers, grain=grain).row_blocks(width, heads)
    _assert_tiles(blocks, width)
    assert all(block.start % grain == 0 for block in blocks)
    units = -(-width // grain)
    assert min(2, units) <= len(blocks) <= units
    time = {n: -(-heads * n // workers) * (-(-units // n) + 0.5) for n in range(2, units + 1)}
    assert len(blocks) == min(time, key=lambda n: time[n], default=1)


@pytest.mark.parametrize(("heads", "blocks"), [(48, 2), (10, 8), (96, 4), (132, 2)])
def test_blocks_of_a_head_for_132_workers(heads: int, blocks: int) -> None:
    assert len(StepPlan(132).row_blocks(128, heads)) == blocks


def test_heads_are_cut_when_there_are_too_few() -> None:
    plan = StepPlan(workers=8)
    assert [plan.splits_heads(heads) for heads in (7, 8)] == [True, False]
    assert StepPlan(8, lowering="rows").splits_heads(99)
    assert not StepPlan(8, lowering="heads").splits_heads(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers must be a positive integer, got 0"),
        ({"batch": 0}, "batch must be a positive integer, got 0"),
        ({"max_seq_len": -1}, "max_seq_len must be a positive integer, got -1"),
        ({"batch": 1.5}, r"batch must be a positive integer, got 1\.5"),
        ({"stops": True}, "stops must be a positive integer, got True"),
        ({"workers": 65_537}, "workers=65,537 is too large.* Expected at most 65,536"),
        ({"batch": 1025}, "batch=1,025 is too large.* Expected at most 1,024"),
        *(
            ({name: 2**31}, f"{name}=2,147,483,648 is too large.* Expected at most 2,147,483,647")
            for name in ("max_seq_len", "context", "steps", "stops")
        ),
        ({"batch": 1024, "max_seq_len": 2**21}, "2,147,483,648 slots.* at most 2,147,483,647"),
        ({"lowering": "row"}, "no lowering 'row'.* Did you mean rows"),
        ({"column_splits": 3}, "column_splits=3.* Expected a power of two"),
    ],
)
def test_refuses(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        StepPlan(**{"workers": 1, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "longest", "spans"),
    [("h200", 100, 1), ("h200", 160, 2), ("h200", 2048, 16), ("h200", 1 << 20, 16), ("cpu", 1, 1)],
)
def test_spans_of_a_gpu_have_the_tokens_of_a_tile(target: str, longest: int, spans: int) -> None:
    """A shorter span would take as long. On a CPU, spans are of whole blocks."""
    machine = TARGETS[target]
    plan = StepPlan.on(machine, max_seq_len=longest)
    assert plan.spans_on(machine, 16) == spans
    short = replace(machine, spans=16, span_tokens=1)
    assert plan.spans_on(short, 16) == min(16, plan.most_blocks(16))


def test_the_largest_sizes() -> None:
    most = 2**31 - 1
    plan = StepPlan(65_536, max_seq_len=most, context=most, steps=most, stops=most)
    plan.check_spans(most, 1)
    with pytest.raises(UsageError, match="2,147,483,648 slots"):
        plan.check_room(16)
    StepPlan(1, batch=1024, max_seq_len=2**21 - 16).check_room(16)
