"""How each side loads the checkpoint. All of them are then called as Hugging Face's models are."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Loaded:
    """A model that is ready, and the processes that hold its weights, by rank."""

    model: Any
    new_cache: Callable[[], Any]
    processes: list[int]


def eager(directory: Path, tp: int) -> Loaded:
    """Hugging Face as it is, in one process."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", trust_remote_code=False)
    return Loaded(model.train(False), lambda: DynamicCache(config=model.config), [os.getpid()])


def hugging_face_tp(directory: Path, tp: int) -> Loaded:
    """Hugging Face's tensor parallelism; this process is one of the ranks, under torchrun."""
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", trust_remote_code=False, **_tp_arguments(tp)
    )
    processes: list[int] = [0] * tp
    dist.all_gather_object(processes, os.getpid())
    return Loaded(model.train(False), lambda: DynamicCache(config=model.config), processes)


def _tp_arguments(tp: int) -> dict[str, Any]:
    try:
        from transformers.distributed.configuration_utils import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_size=tp, tp_plan="auto")}
    except (ImportError, TypeError):  # older: its DistributedConfig knows no tp_size
        return {"tp_plan": "auto"}


def compiled(directory: Path, tp: int) -> Loaded:
    """tpcompile; its ranks are processes that it starts, or with tp=1 this one."""
    import tpcompile

    model = tpcompile.compile(str(directory), tp=tp, backend="torch")
    return Loaded(model, lambda: None, list(model.processes) if tp > 1 else [os.getpid()])


KINDS: dict[str, Callable[[Path, int], Loaded]] = {
    "eager": eager,
    "hugging-face-tp": hugging_face_tp,
    "tpcompile": compiled,
}


def rank() -> int:
    """Of this process under torchrun; 0 elsewhere."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def from_rank_zero(value: Any) -> Any:
    """What rank 0 has, on every rank of this side."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def best(logits: torch.Tensor) -> int:
    return int(logits[0, -1].argmax())
