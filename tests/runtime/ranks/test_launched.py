"""Tests of the process group that a launcher starts."""

from __future__ import annotations

import datetime
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tpcompile.errors import UsageError
from tpcompile.runtime.ranks import launched
from tpcompile.runtime.ranks.launched import agreed_threads


def test_each_rank_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for rank in (0, 1):
        monkeypatch.setattr(dist, "get_node_local_rank", lambda fallback_rank, rank=rank: rank)
        assert launched._own_gpu() == rank
    monkeypatch.setattr(dist, "get_node_local_rank", lambda fallback_rank: 2)
    with pytest.raises(UsageError, match=r"Found 2 GPUs.*torchrun --nproc-per-node 2"):
        launched._own_gpu()


@pytest.mark.parametrize(
    ("local", "expected"),
    [(None, 2), ("2", 2), ("1", 4)],
)
def test_ranks_agree_on_the_smallest_share(
    local: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 may use 4 cores, and rank 0 more. Without a launcher all ranks share a machine."""
    if local is not None:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.setenv(name, "1")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    available = iter((4, 8))
    monkeypatch.setattr("tpcompile.cores.cores", lambda: next(available))
    store: Any = dist.HashStore()

    def agreed(rank: int) -> int:
        gloo: Any = dist.ProcessGroupGloo
        group = gloo(store, rank, 2, datetime.timedelta(seconds=30))
        return agreed_threads(group, torch.device("cpu"))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(agreed, range(2))) == [expected] * 2
