"""Sums in shared memory: threads stand for ranks here, and they may be more than the cores."""

from __future__ import annotations

import mmap
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tpcompile.comm import LIBRARY, PeerError, SharedExchange, exchange_bytes, shared
from tpcompile.comm.shared import PIECES_BYTES, SLOT_BYTES
from tpcompile.ir.layout import TokenLayout
from tpcompile.ir.ops.collectives import tree_sum

SIZES = (
    0,
    1,
    513,
    PIECES_BYTES // 4,
    PIECES_BYTES // 4 + 1,
    SLOT_BYTES // 4,
    SLOT_BYTES // 2 + 3,
    SLOT_BYTES + 4097,
)
"""Numbers of values on both sides of each limit, for values of 2 and 4 bytes."""


def exchanges(
    ranks: int, *, eager: bool = False, peers: Sequence[Any] = (), timeout: float = 30.0
) -> list[SharedExchange]:
    library, memory = LIBRARY.load(), mmap.mmap(-1, exchange_bytes(ranks))
    return [
        SharedExchange(library, memory, rank, ranks, eager=eager, peers=peers, timeout=timeout)
        for rank in range(ranks)
    ]


def together(
    ranks: list[SharedExchange], call: Callable[[SharedExchange, int], Any]
) -> list[torch.Tensor]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(call, ranks, range(len(ranks))))


def terms(ranks: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return [(torch.randn(size, generator=generator) * 3**r).to(dtype) for r in range(ranks)]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize(
    ("dtype", "total"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.int64, torch.float32),
    ],
)
def test_sums_have_the_bits_of_the_tree(ranks: int, dtype: torch.dtype, total: torch.dtype) -> None:
    every = exchanges(ranks)
    for size in SIZES:
        values = terms(ranks, size, dtype)
        expected = tree_sum(values, total)
        for actual in together(every, lambda e, r, v=values: e.all_reduce(v[r], total)):
            assert actual.dtype == total
            assert torch.equal(bits(actual), bits(expected)), size


@pytest.mark.parametrize("ranks", [2, 3])
def test_rounding_of_special_values(ranks: int) -> None:
    """Infinities, NaN, subnormals, zeros of both signs, and sums half way between two bf16."""
    inf, nan, tiny = float("inf"), float("nan"), 1e-40
    first = torch.tensor([inf, inf, nan, tiny, -0.0, 1.0, 1.0078125, 3.3e38]).bfloat16()
    other = torch.tensor([1.0, -inf, 1.0, tiny, -0.0, 2**-8, 2**-8, 3.3e38]).bfloat16()
    values = [first, other, *[torch.full_like(first, -0.0)] * (ranks - 2)]
    expected = tree_sum(values)
    for actual in together(exchanges(ranks), lambda e, r: e.all_reduce(values[r], torch.bfloat16)):
        assert torch.equal(actual.isnan(), expected.isnan())
        assert torch.equal(bits(actual[~actual.isnan()]), bits(expected[~expected.isnan()]))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("tokens", [0, 1, 2, 5, 700])
def test_each_rank_gets_its_run_of_tokens(ranks: int, tokens: int) -> None:
    width = 300
    values = [v.view(tokens, width) for v in terms(ranks, tokens * width, torch.bfloat16)]
    runs = [TokenLayout(ranks).run(rank, tokens) for rank in range(ranks)]
    expected = tree_sum(values, torch.float32)
    parts = together(
        exchanges(ranks), lambda e, r: e.reduce_scatter(values[r], *runs[r], torch.float32)
    )
    for (start, stop), part in zip(runs, parts, strict=True):
        assert part.shape == (stop - start, width)
        assert torch.equal(bits(part), bits(expected[start:stop]))


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_rounds_of_all_kinds_follow_each_other(ranks: int, eager: bool) -> None:
    """Each rank is late in its turn; no round may see terms of another one."""
    sizes = (1, 4096, SLOT_BYTES + 5)

    def work(exchange: SharedExchange, rank: int) -> bool:
        right = True
        for turn in range(30):
            size = sizes[turn % 3]
            time.sleep(0.002 * (turn % ranks == rank))
            sent = torch.full((size,), rank + turn, dtype=torch.uint8)
            room = torch.zeros(ranks, size, dtype=torch.uint8)
            exchange.gather(sent, room)
            right &= all(bool((row == turn + r).all()) for r, row in enumerate(room))
            total = exchange.all_reduce(torch.full((size,), float(rank + turn)), torch.float32)
            right &= bool((total == sum(range(ranks)) + ranks * turn).all())
        return right

    assert all(together(exchanges(ranks, eager=eager), work))


def test_a_sum_does_not_share_memory_with_the_next() -> None:
    def twice(exchange: SharedExchange, rank: int) -> torch.Tensor:
        first = exchange.all_reduce(torch.full((4,), float(rank)), torch.float32)
        for _ in range(3):
            exchange.all_reduce(torch.full((4,), 100.0), torch.float32)
        return first

    for total in together(exchanges(2), twice):
        assert total.tolist() == [1.0] * 4


def test_a_rank_that_ends_while_another_waits_is_noticed() -> None:
    here, there = socket.socketpair()
    first = exchanges(2, peers=[here])[0]
    threading.Timer(0.2, there.close).start()
    with here, pytest.raises(PeerError, match="connection to another rank was lost"):
        first.all_reduce(torch.ones(3), torch.float32)


def test_a_rank_may_end_after_its_last_term(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = exchanges(2)

    class Ended:
        """What tells of an ended rank, whose term has come since it was last looked for."""

        def poll(self, milliseconds: int) -> list[tuple[int, int]]:
            second.all_reduce(torch.ones(3), torch.float32)
            return [(0, 0)]

    monkeypatch.setattr(shared.select, "poll", Ended)
    assert first.all_reduce(torch.ones(3), torch.float32).tolist() == [2.0] * 3


def test_a_rank_that_does_not_come_is_named_as_such() -> None:
    first = exchanges(2, timeout=0.1)[0]
    with pytest.raises(PeerError, match=r"did not answer in time.*0\.1 s"):
        first.all_reduce(torch.ones(3), torch.float32)


def test_a_wait_lets_python_handle_signals() -> None:
    """The library returns to Python now and then while it waits."""
    first = exchanges(2, timeout=30)[0]

    class Interrupt:
        def fileno(self) -> int:
            raise KeyboardInterrupt

    first._peers = [Interrupt()]
    with pytest.raises(KeyboardInterrupt):
        first.all_reduce(torch.ones(3), torch.float32)
