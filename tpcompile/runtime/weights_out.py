"""Export of the weights of a compiled model: one tensor, all of them, or a checkpoint."""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from tpcompile.frontend import Captured
from tpcompile.runtime.ranks.protocols import Ranks
from tpcompile.runtime.saving import refuse_save_options, save_checkpoint
from tpcompile.runtime.whole_weights import WholeWeights, embeddings_of


class WeightsOut:
    """The methods of a Hugging Face model that return or save its weights."""

    _ranks: Ranks
    _check_open: Callable[[], None]

    def _name_weights(self, captured: Captured, graph: fx.GraphModule) -> None:
        self._weights = WholeWeights(graph, captured.tensors, captured.aliases, captured.encodings)
        self._sizes = {name: math.prod(tensor.shape) for name, tensor in captured.tensors.items()}
        self._embeddings = embeddings_of(captured.graph)
        self._vocabulary = min(captured.tensors[name].shape[0] for name in self._embeddings)
        """The number of rows of the embedding."""
        named = [] if captured.model is None else captured.model.named_parameters()
        self._frozen = {name for name, parameter in named if not parameter.requires_grad}
        """The parameters that do not require gradients; empty for a checkpoint."""

    def gather_weight(self, name: str) -> torch.Tensor:
        """Return a checkpoint tensor, assembled from the ranks' shards."""
        self._check_open()
        return self._weights.gather(str(name), self._ranks)

    def state_dict(
        self,
        *,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> Any:
        """Return the whole checkpoint on the CPU as an `OrderedDict`; tied tensors are one tensor.

        The tensors are copies: changing them does not change the ranks.
        """
        self._check_open()
        tensors = OrderedDict() if destination is None else destination
        for name, tensor in self._weights.state_dict(self._ranks).items():
            tensors[prefix + name] = tensor
        return tensors

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        *,
        max_shard_size: int | str = "50GB",
        **options: Any,
    ) -> None:
        """Write a checkpoint as Hugging Face's `save_pretrained` does, one tensor at a time.

        Files of the same names are replaced after all files are written. Under torchrun every
        process calls this, and rank 0 writes.
        """
        self._check_open()
        refuse_save_options(options)
        save_checkpoint(
            self, self._weights, self._ranks, save_directory, max_shard_size, main=is_main_process
        )

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Return the number of parameters of the original model, as Hugging Face counts them."""
        out = {*(self._embeddings if exclude_embeddings else ())}
        out |= self._frozen if only_trainable else set()
        return sum(size for name, size in self._sizes.items() if name not in out)
