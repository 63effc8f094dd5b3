"""Hugging Face's own ways to run a model: eager, compiled by Inductor, and tensor parallel."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._inductor import config as inductor
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from benchmarks.peers.kinds import Loaded, Settings, Sizes
from benchmarks.peers.torch_decoder import TorchDecoder


def eager(settings: Settings) -> Loaded:
    """Load the unchanged model in one process."""
    model = _model(settings)
    decoder = TorchDecoder(model, lambda: DynamicCache(config=model.config))
    return Loaded(decoder, [os.getpid()], sizes=sizes_of(model))


def compiled(settings: Settings) -> Loaded:
    """Load the model. Its decode step is compiled when the first sequences begin."""
    model = _model(settings)
    return Loaded(CompiledDecoder(model), [os.getpid()], sizes=sizes_of(model))


def parallel(settings: Settings) -> Loaded:
    """Load with Hugging Face's tensor parallelism. Under torchrun this process is one rank."""
    model = _model(settings, **_tp_arguments(settings.tp))
    processes: list[int] = [0] * settings.tp
    dist.all_gather_object(processes, os.getpid())
    decoder = TorchDecoder(model, lambda: DynamicCache(config=model.config))
    return Loaded(decoder, processes, _from_rank_zero, sizes=sizes_of(model))


def sizes_of(model: Any) -> Sizes:
    """Return the bytes of the parameters, of all ranks, of the cache and of states."""
    tensors = {
        id(parameter): parameter.numel() * parameter.element_size()
        for parameter in model.parameters()
    }
    held = sum(tensors.values())
    table, head = (
        id(get_embeddings().weight)
        for get_embeddings in (model.get_input_embeddings, model.get_output_embeddings)
    )
    config, itemsize = model.config, model.dtype.itemsize
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    linear = kinds.count("linear_attention")
    values = (len(kinds) - linear) * config.num_key_value_heads * config.head_dim
    read = held if table == head else held - tensors[table]
    states = linear * _state_bytes(config, itemsize) if linear else 0
    return Sizes(held, read, 2 * values * itemsize, states)


def _state_bytes(config: Any, itemsize: int) -> int:
    """Return the bytes that a layer of linear attention keeps of a sequence."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    tail = (2 * keys + values) * config.linear_conv_kernel_dim * itemsize
    return int(tail + values * config.linear_key_head_dim * torch.float32.itemsize)


class CompiledDecoder(TorchDecoder):
    """A model whose decode step is compiled for a static cache of the sequences' size.

    Attention reads the whole cache, so a larger one would be slower. Prompts run eagerly, as in
    `generate`.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model, lambda: None)
        self._size: tuple[int, int] | None = None

    def begin(self, batch: int, length: int) -> None:
        """Empty the cache. For another size, make a new cache and compile the step again."""
        if self._size != (batch, length):
            torch._dynamo.reset()
            self._compiled = torch.compile(self._model, dynamic=False)
            self._cache = StaticCache(config=self._model.config, max_cache_len=length)
            with inductor.patch(freezing=True):
                for tokens in ([0, 0], [0], [0]):  # allocate the cache, then compile the step
                    self.step([tokens] * batch)
            self._size = (batch, length)
        with torch.inference_mode():  # the cache was allocated in this mode
            self._cache.reset()

    def step(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Run the compiled step if there is one token per sequence."""
        return self._call(self._compiled if len(rows[0]) == 1 else self._model, rows)


def _model(settings: Settings, **arguments: Any) -> Any:
    torch.set_num_threads(settings.threads)
    model = AutoModelForCausalLM.from_pretrained(
        settings.path, dtype="auto", trust_remote_code=False, **arguments
    )
    return model.train(False)


def _tp_arguments(tp: int) -> dict[str, Any]:
    try:
        from transformers.distributed.configuration_utils import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_size=tp, tp_plan="auto")}
    except (ImportError, TypeError):  # older versions: DistributedConfig has no tp_size
        return {"tp_plan": "auto"}


def _from_rank_zero(value: Any) -> Any:
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
