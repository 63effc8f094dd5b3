"""The memory for the KV cache and the states of linear attention."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from tpcompile.cgroups import ROOT, ControlGroup, groups_of
from tpcompile.errors import UsageError
from tpcompile.runtime.model import CompiledModel

_SHARE = {"cpu": 0.5, "cuda": 0.8}
"""The share of the free memory that the cache and the states may take by default."""
_NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
"""By version of control groups: the limit, the usage, and its part that caches files. In version 1
an unlimited group has a limit that no machine reaches.
"""


def room_for(
    model: CompiledModel,
    sequences: int,
    kv_tokens: int | None,
    snapshots: int | None,
    guesses: int = 0,
) -> tuple[int, int]:
    """Return the tokens of a KV cache and the number of states. Raise UsageError if they don't fit.

    By default there are tokens for the longest sequences, or as many as fit in a share of the free
    memory. With linear attention, each of the `guesses` of a step has a state of its own.
    """
    states = states_for(model, sequences, snapshots)
    states += guesses if states else 0
    share = 1.0 if kv_tokens else _share(model)
    free = _free(model.device) * share
    fit = _tokens_in(model, free, states)
    tokens = kv_tokens or min(sequences * model.max_seq_len, max(fit, model.block_size))
    if tokens <= fit:
        return tokens, states
    per_state = _bytes_per_state(model)
    needed = tokens * _bytes_per_token(model) + states * per_state
    contents = f"{tokens:,} tokens" + (f" and {states:,} states" if states else "")
    hint = f"Choose a kv_tokens of at most {fit:,}"
    if states and fit < model.block_size:
        hint = (
            f"Choose a max_batch of at most {int(free / per_state / 2):,}, or fewer snapshots: "
            f"each sequence has two states of {per_state / 1e6:,.1f} MB"
        )
    raise UsageError(
        f"A KV cache of {contents} must fit in {f'{share:.0%} of ' * (share < 1)}the free memory",
        got=f"{needed / 1e9:,.1f} GB",
        expected=f"at most {free / 1e9:,.1f} GB",
        hint=hint,
    )


def states_for(model: CompiledModel, sequences: int, snapshots: int | None = None) -> int:
    """Return the number of states for sequences and snapshots; 0 without linear attention.

    By default there is a snapshot for each state of a sequence, or as many as fit in half of the
    memory of the KV cache and the states.
    """
    per_state, running = _bytes_per_state(model), 2 * sequences
    if snapshots is not None and (not isinstance(snapshots, int) or snapshots < 0):
        raise UsageError(f"snapshots must be an int of at least 0, got {snapshots!r}")
    if not per_state:
        return 0
    if snapshots is None:
        fit = int(_free(model.device) * _share(model) / 2 / per_state)
        snapshots = min(running, max(0, fit - running))
    return running + snapshots


def tokens_that_fit(model: CompiledModel, states: int) -> int:
    """Return the tokens whose K and V fit in the free memory beside the states."""
    return max(0, _tokens_in(model, _free(model.device) * _share(model), states))


def _tokens_in(model: CompiledModel, memory: float, states: int) -> int:
    """Return the tokens that fit in memory beside states; negative if these alone do not fit."""
    return int((memory - states * _bytes_per_state(model)) / _bytes_per_token(model))


def _share(model: CompiledModel) -> float:
    return _SHARE[model.device.type]


def _bytes_per_token(model: CompiledModel) -> int:
    return sum(rank["kv_bytes_per_token"] for rank in model.plan.to_json()["ranks"])


def _bytes_per_state(model: CompiledModel) -> int:
    return sum(rank["state_bytes_per_sequence"] for rank in model.plan.to_json()["ranks"])


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_memory()


def free_memory(root: Path = ROOT) -> int:
    """Return the bytes that this process can take without swapping, in its container if any.

    Memory that caches files counts as free. `root` is where `/proc` and `/sys` are.
    """
    return min((_of_machine(root), *_of_groups(root)))


def _of_machine(root: Path) -> int:
    meminfo = root / "proc/meminfo"
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
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
    """Return the bytes of a group that cache inactive files."""
    for line in (group.read("memory.stat") or "").splitlines():
        if line.startswith(f"{name} "):
            return int(line.split()[1])
    return 0
