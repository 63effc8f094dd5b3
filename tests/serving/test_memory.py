"""The KV cache takes memory that is free, when the engine starts."""

from __future__ import annotations

from pathlib import Path

import pytest

import tpcompile
from tests.models import preset_pair
from tpcompile.errors import UsageError
from tpcompile.serving import Engine, memory

GB = 10**9


def machine(root: Path, available: int, groups: dict[str, tuple[str, int, int]]) -> Path:
    """Make files as Linux shows them: each group's limit, its use, and its copies of files."""
    (root / "proc/self").mkdir(parents=True)
    lines = "MemTotal: 1 kB\n", f"MemAvailable:   {available // 1024} kB\n"
    (root / "proc/meminfo").write_text("".join(lines))
    (root / "proc/self/cgroup").write_text("1:cpu:/other\n0::/pods/own\n")
    for name, (limit, used, files) in groups.items():
        group = root / "sys/fs/cgroup" / name
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"active_file 5\ninactive_file {files}\n")
    return root


@pytest.mark.parametrize(
    ("groups", "free"),
    [
        ({}, 8 * 1024**3),
        ({"pods/own": ("max", GB, 0)}, 8 * 1024**3),
        ({"pods/own": (str(3 * GB), GB, 0)}, 2 * GB),
        ({"pods/own": (str(3 * GB), 2 * GB, GB)}, 2 * GB),
        ({"pods": (str(GB), GB // 2, 0), "pods/own": (str(3 * GB), GB, 0)}, GB // 2),
        ({"pods/own": (str(GB), 2 * GB, 0)}, 0),
        ({"pods/another": (str(GB), GB, 0)}, 8 * 1024**3),
    ],
)
def test_free_memory(tmp_path: Path, groups: dict[str, tuple[str, int, int]], free: int) -> None:
    assert memory.free_memory(machine(tmp_path, 8 * 1024**3, groups)) == free


def test_free_memory_of_this_machine() -> None:
    assert 0 < memory.free_memory() < 2**60


def test_a_system_without_these_files(tmp_path: Path) -> None:
    assert 0 < memory.free_memory(tmp_path) < 2**60


def test_more_than_there_is_is_refused() -> None:
    with tpcompile.compile(preset_pair("tiny-qwen3").eager, max_seq_len=64) as model:
        most = memory.free_memory() // memory._bytes_per_token(model)
        with pytest.raises(UsageError, match=r"must fit in the free memory.*Choose a kv_tokens"):
            Engine(model, kv_tokens=2 * most)
        with Engine(model, kv_tokens=64) as engine:
            assert engine.scheduler.limits.most_tokens == 64


def test_a_batch_takes_what_its_requests_need() -> None:
    with tpcompile.compile(preset_pair("tiny-qwen3").eager, max_seq_len=512) as model:
        block = model.block_size
        assert model.generate_batch([[1, 2, 3], [4, 5]], max_new_tokens=2)
        assert model._cache_pool.blocks == 2
        assert model.generate_batch(
            [[1] * (block + 1)], max_new_tokens=2, do_sample=True, num_return_sequences=2
        )
        assert model._cache_pool.blocks == 4
