"""Loading the checkpoint on each side. All models are then called like Hugging Face's."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Loaded:
    """A loaded model, and the processes that hold its weights, by rank."""

    model: Any
    new_cache: Callable[[], Any]
    processes: list[int]


def eager(directory: Path, tp: int) -> Loaded:
    """Load Hugging Face's unchanged model in one process."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", trust_remote_code=False)
    return Loaded(model.train(False), lambda: DynamicCache(config=model.config), [os.getpid()])


def hugging_face_tp(directory: Path, tp: int) -> Loaded:
    """Load with Hugging Face's tensor parallelism. Under torchrun this process is one rank."""
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
    except (ImportError, TypeError):  # older versions: DistributedConfig has no tp_size
        return {"tp_plan": "auto"}


def compiled(directory: Path, tp: int, backend: str = "torch") -> Loaded:
    """Load with tpcompile. Its ranks are worker processes or, with tp=1, this process."""
    import tpcompile

    model = tpcompile.compile(str(directory), tp=tp, backend=backend)
    return Loaded(model, lambda: None, list(model.processes) if tp > 1 else [os.getpid()])


KINDS: dict[str, Callable[[Path, int], Loaded]] = {
    "eager": eager,
    "hugging-face-tp": hugging_face_tp,
    "tpcompile": compiled,
    "tpcompile-native": partial(compiled, backend="native"),
}


def rank() -> int:
    """Return the rank of this process under torchrun; 0 elsewhere."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def from_rank_zero(value: Any) -> Any:
    """Broadcast rank 0's value to every rank of this side."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def best(logits: torch.Tensor) -> int:
    return int(logits[0, -1].argmax())
