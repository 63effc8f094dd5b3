"""Ranks over torch.distributed give the bits of simulated ranks, and report faults by name."""

from __future__ import annotations

import datetime
import mmap
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tpcompile.comm import (
    LIBRARY,
    Group,
    PeerError,
    ProcessGroupRank,
    SharedExchange,
    SimulatedGroup,
    exchange_bytes,
    process_group,
)
from tpcompile.comm.process_group import WHOLE_BYTES
from tpcompile.ir.layout import TokenLayout
from tpcompile.ir.ops.collectives import tree_sum

LARGE = WHOLE_BYTES // 4 + 5
"""A number of fp32 values that is sent in several pieces of unequal size."""


def _connected(ranks: int, seconds: float = 30.0) -> list[Any]:
    """Create one process group per rank, in threads, without a default group or processes."""
    store: Any = dist.HashStore()
    limit = datetime.timedelta(seconds=seconds)

    def connect(rank: int) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        return gloo(store, rank, ranks, limit)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(connect, range(ranks)))


@cache
def _groups(ranks: int) -> list[ProcessGroupRank]:
    return [ProcessGroupRank(group) for group in _connected(ranks)]


@cache
def _sharing(ranks: int) -> list[ProcessGroupRank]:
    """Return a group that shares memory."""
    memory, library = mmap.mmap(-1, exchange_bytes(ranks)), LIBRARY.load()

    def near(rank: int) -> SharedExchange:
        return SharedExchange(library, memory, rank, ranks, eager=False, peers=[], timeout=30)

    return [ProcessGroupRank(group, near(rank)) for rank, group in enumerate(_connected(ranks))]


@pytest.fixture(scope="module", autouse=True)
def _ended() -> Iterator[None]:
    yield
    _groups.cache_clear()
    _sharing.cache_clear()


def _together(ranks: list[Group], call: Callable[[Group, int], torch.Tensor]) -> list[torch.Tensor]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(call, ranks, range(len(ranks))))


def _both(
    ranks: int, call: Callable[[Group, int], torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the results of process groups (shared memory must agree) and of simulated ranks."""
    simulated = SimulatedGroup(ranks)
    expected = _together([simulated.rank(rank) for rank in range(ranks)], call)
    actual = _together(list(_groups(ranks)), call)
    _same_bits(_together(list(_sharing(ranks)), call), actual)
    return actual, expected


def _same_bits(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def _terms(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Callable[[int], Any]:
    def term(rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rank)
        return (torch.randn(shape, generator=generator) * 10**rank).to(dtype)

    return term


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(2, 7), (LARGE,), ()], ids=["small", "large", "scalar"])
@pytest.mark.parametrize(
    ("dtype", "total"),
    [
        (torch.float32, None),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, None),
        (torch.int64, None),
    ],
)
def test_sums_have_the_bits_of_the_tree(
    ranks: int, shape: tuple[int, ...], dtype: torch.dtype, total: torch.dtype | None
) -> None:
    term = _terms(shape, dtype)
    expected = tree_sum([term(rank) for rank in range(ranks)], total)
    for groups in (_groups(ranks), _sharing(ranks)):
        for actual in _together(list(groups), lambda g, r: g.all_reduce(term(r), total)):
            _same_bits([actual], [expected])


def test_a_sum_does_not_share_memory_with_the_next() -> None:
    """Results are not overwritten when scratch memory is reused."""

    def twice(group: Group, rank: int) -> torch.Tensor:
        first = group.all_reduce(torch.full((4,), float(rank)))
        group.all_reduce(torch.full((4,), 100.0))
        return first

    for groups in (*map(_groups, (1, 2, 3)), *map(_sharing, (2, 3))):
        ranks = len(groups)
        for total in _together(list(groups), twice):
            assert total.tolist() == [float(sum(range(ranks)))] * 4


def test_a_sum_leaves_its_terms_alone_and_takes_any_strides() -> None:
    def call(group: Group, rank: int) -> torch.Tensor:
        x = torch.arange(6.0).view(2, 3).t()
        total = group.all_reduce(x)
        assert torch.equal(x, torch.arange(6.0).view(2, 3).t())
        return total

    for ranks in (2, 3):
        _same_bits(*_both(ranks, call))


def test_sums_inside_and_outside_of_inference_mode() -> None:
    def call(group: Group, rank: int) -> torch.Tensor:
        with torch.inference_mode():
            group.all_reduce(torch.ones(3))
        return group.all_reduce(torch.ones(3))

    _same_bits(*_both(3, call))


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("extents", [(2, 3, 2), (0, 5, 1), (0, 0, 0)])
@pytest.mark.parametrize("told", [True, False])
def test_parts_of_any_width_are_gathered(dim: int, extents: tuple[int, ...], told: bool) -> None:
    def call(group: Group, rank: int) -> torch.Tensor:
        shape = [4, 4]
        shape[dim] = extents[rank]
        part = _terms(tuple(shape), torch.bfloat16)(rank)
        return group.all_gather(part, dim, extents if told else None)

    _same_bits(*_both(3, call))


def test_parts_that_are_not_as_wide_as_planned_are_refused() -> None:
    group = _groups(2)[0]
    with pytest.raises(ValueError, match=r"must be \[2, 3\], rank 0 has shape \(4,\)"):
        group.all_gather(torch.ones(4), 0, (2, 3))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_each_rank_gets_its_run_of_tokens_of_the_sum(ranks: int, tokens: int) -> None:
    def call(group: Group, rank: int) -> torch.Tensor:
        return group.reduce_scatter(_terms((tokens, 5), torch.bfloat16)(rank), torch.float32)

    actual, expected = _both(ranks, call)
    _same_bits(actual, expected)
    runs = [TokenLayout(ranks).run(rank, tokens) for rank in range(ranks)]
    assert [len(part) for part in actual] == [stop - start for start, stop in runs]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "row",
    [
        [1.0, 3.0, 2.0],
        [3.0, 1.0, 3.0],
        [-1.0, -1.0, -1.0],
        [0.0, NAN, INF],
        [NAN, 5.0, NAN],
        [-INF, -INF, -INF],
        [-0.0, 0.0, -0.0],
    ],
)
def test_the_best_id_is_that_of_the_whole_row(row: list[float], dtype: torch.dtype) -> None:
    """The global id wins: each rank's maximum is its second column, with id 2r + 1."""
    whole = torch.tensor([[-INF, value] for value in row], dtype=dtype).view(1, -1)

    def call(group: Group, rank: int) -> torch.Tensor:
        shard = whole[:, 2 * rank : 2 * rank + 2].expand(4, -1)
        best = shard.argmax(-1)
        return group.argmax(shard.gather(1, best[:, None]).squeeze(1), best + 2 * rank)

    actual, simulated = _both(3, call)
    for ids in (*actual, *simulated):
        assert ids.tolist() == [int(whole.argmax())] * 4


def test_few_bytes_are_sent_for_the_best_id() -> None:
    sent = []

    class Watched(ProcessGroupRank):
        def _gather(self, flat: torch.Tensor, scratch: bool = False) -> torch.Tensor:
            sent.append(flat.nbytes)
            return flat.clone()

    group = Watched(dist.ProcessGroupGloo(dist.HashStore(), 0, 1, datetime.timedelta(seconds=5)))
    group.argmax(torch.ones(5), torch.zeros(5, dtype=torch.long))
    assert 0 < sum(sent) <= 64 * 5


@pytest.mark.parametrize(
    "x", [torch.arange(6, dtype=torch.bfloat16).view(2, 3), torch.ones(()), torch.zeros(0, 3)]
)
def test_what_one_rank_has_all_get(x: torch.Tensor) -> None:
    def call(group: Any, rank: int) -> torch.Tensor:
        received: torch.Tensor = group.broadcast(x if rank == 1 else None, 1, torch.device("cpu"))
        return received

    for received in _together(list(_groups(3)), call):
        _same_bits([received], [x])


def test_a_rank_that_does_not_come_is_named_as_such() -> None:
    first, _second = _connected(2, seconds=0.5)
    with pytest.raises(PeerError, match="did not answer in time"):
        ProcessGroupRank(first).all_reduce(torch.ones(3))


def test_a_rank_that_has_gone_is_named_as_such() -> None:
    groups = _connected(2)
    first = ProcessGroupRank(groups[0])
    groups.clear()  # closes the second rank's connections
    with pytest.raises(PeerError, match="connection to another rank was lost"):
        first.all_reduce(torch.ones(3))


def test_nothing_is_waited_for_where_the_group_was_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def sleep(seconds: float) -> None:
        raise AssertionError("there is nothing to wait for")

    monkeypatch.setattr(time, "sleep", sleep)
    ProcessGroupRank(_connected(1)[0]).wait_for_release()


def test_what_the_group_still_uses_is_kept_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pending collective keeps its tensor until it completes; here rank 1 joins during `rest`."""
    first, second = _connected(2)
    rank = ProcessGroupRank(first)
    late, other = torch.ones(5), torch.ones(5)
    reference = weakref.ref(late)

    class Pending:
        """Work handle that never blocks."""

        def wait(self) -> None:
            pass

    rank._wait(lambda x: first.allreduce([x]) and Pending(), late)
    rank._wait(lambda x: Pending(), torch.ones(1))
    address = late.data_ptr()
    del late
    assert reference() is not None, "the collective is pending"
    slept = 0

    def sleep(seconds: float) -> None:
        nonlocal slept
        slept += 1
        if slept == 3:
            second.allreduce([other]).wait()
        wait(seconds)

    wait = time.sleep
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(process_group, "_LAST_S", 60.0)
    rank.wait_for_release()
    assert slept > 3
    held = reference()
    assert held is not None and held.data_ptr() == address
    assert torch.equal(held, torch.full((5,), 2.0))
    assert held._use_count() == 1
    slept = 3
    rank._wait(lambda x: Pending(), torch.ones(1))
    del held
    assert reference() is None, "the collective is complete"
