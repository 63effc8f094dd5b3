"""A captured model with its weights, the same model in fp32, and the Hugging Face model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tpcompile.errors import UnsupportedError
from tpcompile.frontend import Captured, capture
from tpcompile.ir.format import Format
from tpcompile.ir.ops.few_bits import RoundingWeight
from tpcompile.ir.pieces import Read
from tpcompile.ir.simulate import whole_value


@dataclass(frozen=True)
class Source:
    """A captured model and its weights."""

    captured: Captured
    read: Read
    kv: Format | None = None
    """The format of the KV cache, None for one in the model's dtype."""
    adapted: bool = False
    """Whether an adapter is merged into the weights of `read`."""

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.captured.graph.parameters())).dtype

    @property
    def few_bits(self) -> bool:
        """Whether weights are in 8 or 4 bits."""
        return any(tensor.format is not None for tensor in self.captured.tensors.values())

    @property
    def rounds(self) -> bool:
        """Whether linears of the model round their inputs to int8."""
        formats = (tensor.format for tensor in self.captured.tensors.values())
        return any(stored is not None and stored.rounds for stored in formats)


def in_fp32(source: Source) -> Source | None:
    """Return the model in fp32 with the same weights, to tell rounding from errors.

    Its linears do not round their inputs, and its KV cache does not round keys and values. Return
    None if the model itself rounds nothing.
    """
    dtype, read = source.dtype, source.read
    rounds = source.rounds or source.kv is not None
    if dtype.itemsize >= torch.float32.itemsize and not rounds:
        return None
    exact = capture(source.captured.config, dtype=torch.float32)
    graphs = (exact.graph, source.captured.graph)
    names, wanted = ([node.name for node in gm.graph.nodes] for gm in graphs)
    if names != wanted:
        raise UnsupportedError(
            f"The fp32 graph differs from the {dtype} graph, so its values have no exact reference",
            hint="Give a tolerance, so that no reference in fp32 is needed",
        )
    plain = {tensor.name for tensor in source.captured.tensors.values() if tensor.format is None}

    def rounded(name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Return the numbers of the model in fp32; components of formats are exact."""
        values = read(name, index)
        return values.to(dtype).float() if name in plain else values

    return Source(exact, rounded)


def eager_model(source: Source) -> Any:
    """Return the user's own model, or a Hugging Face model with the same weights.

    A model whose weights are quantized or adapted while it is loaded has other weights than the
    user's. Linears round their inputs as the formats of their weights say.
    """
    changed = source.captured.quantized or source.adapted
    if source.captured.model is not None and not changed:
        return source.captured.model
    make: Any = AutoModelForCausalLM.from_config
    model = make(source.captured.config, dtype=source.dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = source.captured.tensors[name]
            parameter.copy_(whole_value(tensor, source.read, parameter.dtype))
    captured = source.captured
    for path, linear in model.named_modules():
        name = f"{path}.weight"
        stored = captured.tensors.get(captured.aliases.get(name, name))
        if not isinstance(linear, nn.Linear) or stored is None or stored.format is None:
            continue
        if stored.format.rounds:
            values = whole_value(stored, source.read, torch.float32)
            weight = RoundingWeight(values, stored.format, 0, linear.weight.dtype)
            linear.forward = partial(_linear, linear, weight)  # type: ignore[method-assign]
    return model


def _linear(linear: nn.Linear, weight: RoundingWeight, inputs: torch.Tensor) -> torch.Tensor:
    return weight.linear(inputs, linear.bias)
