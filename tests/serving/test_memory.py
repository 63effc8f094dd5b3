"""The KV cache takes memory that is free, when the engine starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import tpcompile
from tests.machine_files import V1, V2, group, process
from tests.models import preset_pair
from tpcompile.errors import UsageError
from tpcompile.serving import Engine, memory

GB = 10**9


NAMES = {
    1: ("memory__limit_in_bytes", "memory__usage_in_bytes", "total_inactive_file"),
    2: ("memory__max", "memory__current", "inactive_file"),
}
NO_LIMIT = {1: str(2**63 - 4096), 2: "max"}


def machine(
    root: Path, available: int, groups: dict[str, tuple[str, int, int]], version: int
) -> Path:
    """Make files as Linux shows them: each group's limit, its use, and its copies of files."""
    mounts = f"/ {V1.format('memory')}", f"/ {V2.format('')}"
    process(root, ("1:memory:/pods/own\n", "0::/pods/own\n")[version - 1], *mounts)
    lines = "MemTotal: 1 kB\n", f"MemAvailable:   {available // 1024} kB\n"
    (root / "proc/meminfo").write_text("".join(lines))
    limits, uses, copies = NAMES[version]
    for name, (limit, used, files) in groups.items():
        text = NO_LIMIT[version] if limit == "max" else limit
        texts = {limits: text, uses: str(used), "memory__stat": f"active_file 5\n{copies} {files}"}
        group(root, ("memory/" if version == 1 else "") + name, **texts)
    return root


@pytest.mark.parametrize("version", [1, 2])
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
def test_free_memory(
    tmp_path: Path, groups: dict[str, tuple[str, int, int]], free: int, version: int
) -> None:
    assert memory.free_memory(machine(tmp_path, 8 * 1024**3, groups, version)) == free


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


@pytest.fixture(scope="module")
def hybrid() -> Iterator[tpcompile.CompiledModel]:
    with tpcompile.compile(
        preset_pair("tiny-qwen3.5").eager, max_seq_len=64, backend="torch"
    ) as compiled:
        yield compiled


STATE = 3 * 4 * (6 * 16 * 16 + 3 * (2 * 3 + 6) * 16)
"""The bytes of a state of tiny-qwen3.5: three layers, six heads, and three inputs per channel."""


def test_states_count(hybrid: tpcompile.CompiledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two for each sequence come first, then the KV cache, and snapshots up to a half."""
    for free, tokens, states in (
        (GB, 4 * 64, 16),
        (2 * 24 * STATE, 4 * 64, 12),
        (2 * 10 * STATE, 2 * STATE // 256, 8),
    ):
        monkeypatch.setattr(memory, "free_memory", lambda free=free: free)
        assert memory.room_for(hybrid, 4, None, None) == (tokens, states)
    assert memory.room_for(hybrid, 4, 64, 1) == (64, 9)
    assert memory.states_for(hybrid, 4, 0) == 8


def test_states_that_do_not_fit(
    hybrid: tpcompile.CompiledModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 2 * 7 * STATE)
    with pytest.raises(UsageError, match=r"32 tokens and 8 states must fit in 50% of the free me"):
        Engine(hybrid, max_batch=4)
    with pytest.raises(UsageError, match=r"max_batch of at most 3.*two states of 0.0 MB"):
        Engine(hybrid, max_batch=4)
    with pytest.raises(UsageError, match=r"64 tokens and 18 states must fit in the free memory"):
        Engine(hybrid, max_batch=4, kv_tokens=64, snapshots=10)
    with pytest.raises(UsageError, match="snapshots must be an int of at least 0, got -1"):
        Engine(hybrid, snapshots=-1)


def test_the_ranks_have_no_more_states_than_that(hybrid: tpcompile.CompiledModel) -> None:
    """A batch of two requests takes states for two, and an engine exactly as many as it says."""
    states = hybrid._cache_pool.states
    assert states is not None
    outputs = hybrid.generate_batch([[1, 2], [3]], max_new_tokens=2)
    assert len(outputs) == 2 and states.blocks == 2 * 2 + 2 * 2
    with Engine(hybrid, max_batch=3, snapshots=5, kv_tokens=128):
        assert states.blocks == states.used == 11
    assert states.used == 0


def test_a_batch_takes_what_its_requests_need() -> None:
    with tpcompile.compile(preset_pair("tiny-qwen3").eager, max_seq_len=512) as model:
        block = model.block_size
        assert model.generate_batch([[1, 2, 3], [4, 5]], max_new_tokens=2)
        assert model._cache_pool.blocks == 2
        assert model.generate_batch(
            [[1] * (block + 1)], max_new_tokens=2, do_sample=True, num_return_sequences=2
        )
        assert model._cache_pool.blocks == 4
