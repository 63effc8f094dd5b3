"""The memory that a KV cache may take by default."""

from __future__ import annotations

import os

import torch

from tpcompile.runtime.model import CompiledModel

_SHARE = {"cpu": 0.5, "cuda": 0.8}
"""The share of the free memory that the KV cache may take."""


def tokens_that_fit(model: CompiledModel) -> int:
    """Return the tokens whose K and V fit in the free memory of this machine, on all ranks."""
    each = sum(rank["kv_bytes_per_token"] for rank in model.plan.to_json()["ranks"])
    if model.device.type == "cuda":
        free = torch.cuda.mem_get_info(model.device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(free * _SHARE[model.device.type] / each)
