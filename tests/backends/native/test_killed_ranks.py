"""A rank that ends within a launch of several steps, while the other rank waits for its sum."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

import tpcompile
from tests import scripts
from tests.models import long_config
from tpcompile.errors import RankError, UsageError

pytestmark = pytest.mark.usefixtures("captured_once", "forked_launchers")

IDS = torch.tensor([[5, 9, 2, 7]])


class _Kills(BaseStreamer):
    """Kills a process when some tokens have come."""

    def __init__(self, process: int) -> None:
        self.process, self.left = process, 4

    def put(self, value: torch.Tensor) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(self.process, signal.SIGKILL)

    def end(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_in_a_launch(rank: int) -> None:
    """The error names the rank, and the rank that waits for it ends too."""
    with tpcompile.compile(long_config(), tp=2, backend="native", random_weights=0) as model:
        processes = model.processes
        begin = time.monotonic()
        with pytest.raises(RankError, match=f"Rank {rank} was killed by signal SIGKILL"):
            model.generate(IDS, max_new_tokens=2000, streamer=_Kills(processes[rank]))
        assert time.monotonic() - begin < 60
        with pytest.raises(UsageError):
            model.generate(IDS, max_new_tokens=2)
    assert not any(Path(f"/proc/{process}").exists() for process in processes)


_LAUNCHED = """
import os, signal, sys, torch, tpcompile
import torch.distributed as dist
from tests.backends.native.test_killed_ranks import IDS, _Kills
from tests.models import long_config
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
model = tpcompile.compile(
    long_config(), tp=2, backend={backend!r}, random_weights=0
)
model.generate(IDS, max_new_tokens=2000, streamer=_Kills(os.getpid()) if rank else None)
"""


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_rank_of_a_launcher_killed_in_a_launch(tmp_path: Path, backend: str) -> None:
    """The other rank notices it, and does not wait for as long as a rank may take."""
    script = tmp_path / "script.py"
    script.write_text(_LAUNCHED.format(backend=backend))
    with tempfile.TemporaryFile("w+") as log:
        ranks = [
            scripts.start([str(script), str(rank), f"{tmp_path}/met"], log.fileno(), log.fileno())
            for rank in range(2)
        ]
        assert ranks[1].wait(300) == -signal.SIGKILL
        assert ranks[0].wait(300) == 1
        log.seek(0)
        last = log.read().splitlines()[-1]
    assert "Another rank has ended" in last or "connection to another rank was lost" in last
