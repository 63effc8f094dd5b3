"""Tests of the process group that a launcher starts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tpcompile.errors import UsageError
from tpcompile.runtime.ranks import launched


def test_each_rank_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for rank in (0, 1):
        monkeypatch.setattr(dist, "get_node_local_rank", lambda fallback_rank, rank=rank: rank)
        assert launched._own_gpu() == rank
    monkeypatch.setattr(dist, "get_node_local_rank", lambda fallback_rank: 2)
    with pytest.raises(UsageError, match=r"Found 2 GPUs.*torchrun --nproc-per-node 2"):
        launched._own_gpu()
