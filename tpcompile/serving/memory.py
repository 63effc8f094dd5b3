"""The memory that a KV cache may take."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from tpcompile.cgroups import ROOT, ControlGroup, groups_of
from tpcompile.errors import UsageError
from tpcompile.runtime.model import CompiledModel

_SHARE = {"cpu": 0.5, "cuda": 0.8}
"""The share of the free memory that the KV cache may take by default."""
_NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
"""By version of control groups: the limit, the use, and its part that holds copies of files.

In version 1 a group without a limit has one that no machine reaches.
"""


def tokens_that_fit(model: CompiledModel) -> int:
    """Return the tokens whose K and V fit in the free memory of this machine, on all ranks."""
    return int(_free(model.device) * _SHARE[model.device.type] / _bytes_per_token(model))


def check_fits(model: CompiledModel, tokens: int) -> None:
    """Raise UsageError if K and V of so many tokens do not fit in the free memory."""
    needed, free = tokens * _bytes_per_token(model), _free(model.device)
    if needed > free:
        raise UsageError(
            f"A KV cache of {tokens:,} tokens must fit in the free memory",
            got=f"{needed / 1e9:,.1f} GB",
            expected=f"at most {free / 1e9:,.1f} GB",
            hint=f"Choose a kv_tokens of at most {int(free / _bytes_per_token(model)):,}",
        )


def _bytes_per_token(model: CompiledModel) -> int:
    return sum(rank["kv_bytes_per_token"] for rank in model.plan.to_json()["ranks"])


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_memory()


def free_memory(root: Path = ROOT) -> int:
    """Return the bytes that this process can take without swapping, in its container if any.

    Memory that holds copies of files counts as free. `root` is where `/proc` and `/sys` are.
    """
    return min((_of_machine(root), *_of_groups(root)))


def _of_machine(root: Path) -> int:
    found = root / "proc/meminfo"
    if found.exists():
        for line in found.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_groups(root: Path) -> Iterator[int]:
    """Yield the memory that is left in each control group of this process that has a limit."""
    for group in groups_of("memory", root):
        limit, used, files = _NAMES[group.version]
        most = group.read(limit)
        if most is not None and most != "max":
            yield max(0, int(most) - (group.number(used) or 0) + _of_files(group, files))


def _of_files(group: ControlGroup, name: str) -> int:
    """Return the bytes of a group that hold copies of files not in use."""
    for line in (group.read("memory.stat") or "").splitlines():
        if line.startswith(f"{name} "):
            return int(line.split()[1])
    return 0
