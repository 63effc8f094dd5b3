"""A captured model with its weights, the same in fp32, and the Hugging Face model beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tpcompile.errors import UnsupportedError
from tpcompile.frontend import Captured, capture
from tpcompile.ir.pieces import Read


@dataclass(frozen=True)
class Source:
    """A captured model and its weights."""

    captured: Captured
    read: Read

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.captured.graph.parameters())).dtype


def in_fp32(source: Source) -> Source | None:
    """The same model with the same weights in fp32, to tell rounding from mistakes."""
    dtype, read = source.dtype, source.read
    if dtype.itemsize >= torch.float32.itemsize:
        return None
    exact = capture(source.captured.config, dtype=torch.float32)
    graphs = (exact.graph, source.captured.graph)
    names, wanted = ([node.name for node in gm.graph.nodes] for gm in graphs)
    if names != wanted:
        raise UnsupportedError(
            f"The model is another graph in fp32 than in {dtype}, so its values have no exact ones",
            hint="Give a tolerance: then both sides are compared as they are",
        )
    return Source(exact, lambda name, index: read(name, index).to(dtype).float())


def eager_model(source: Source) -> Any:
    """The user's own model, or Hugging Face's with the same weights."""
    if source.captured.model is not None:
        return source.captured.model
    make: Any = AutoModelForCausalLM.from_config
    model = make(source.captured.config, dtype=source.dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(source.read(name, tuple(slice(0, n) for n in parameter.shape)))
    return model
