"""The storage of a checkpoint's weights, from the `quantization_config` of its configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tpcompile.errors import UnsupportedError, UsageError
from tpcompile.frontend.linears import model_linears
from tpcompile.frontend.stored import awq, compressed, fp8, gguf, gptq
from tpcompile.frontend.stored.layout import StoredWeight, UnreadWeightsError, refuse
from tpcompile.frontend.stored.methods import method_of, unread
from tpcompile.ir.codec import Codec, Encodings, Known
from tpcompile.ir.recipe import Tensor
from tpcompile.ir.stacked import linears_of

_Weights = Callable[
    [nn.Module, Mapping[str, Any], Mapping[str, torch.dtype], bool], dict[str, StoredWeight]
]
_METHODS: Mapping[str, _Weights] = {
    "compressed-tensors": compressed.weights_of,
    "gptq": gptq.weights_of,
    "awq": awq.weights_of,
    "fp8": fp8.weights_of,
    gguf.METHOD: gguf.weights_of,
}
"""The functions that return the weights of a scheme, by its `quant_method`."""


def stored_weights(
    module: nn.Module, config: Any, scales: Mapping[str, torch.dtype], rounds: bool = False
) -> dict[str, StoredWeight]:
    """Return the weights that are not stored as their values, by name.

    `scales` are the dtypes of scales in the checkpoint; others have the dtype of the model. With
    `rounds`, the weights are those of linears that round their inputs, and there must be some.
    """
    stored = _stacked(module, _weights(module, config, scales, rounds))
    if not rounds:
        return stored
    if not any(weight.format.may_round for weight in stored.values()):
        raise UsageError(
            "Only linears with integers as weights round activations, and this model has none",
            got="activations='int8'",
            hint='Add weights="int8" or weights="int4", or omit activations',
        )
    return {
        name: replace(item, format=item.format.rounding()) if item.format.may_round else item
        for name, item in stored.items()
    }


def _weights(
    module: nn.Module, config: Any, scales: Mapping[str, torch.dtype], rounds: bool
) -> dict[str, StoredWeight]:
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return {}
    scheme = quantization.to_dict() if hasattr(quantization, "to_dict") else quantization
    if not isinstance(scheme, dict):
        refuse("", scheme, "an object")
    method = method_of(scheme)
    if method not in _METHODS:
        raise unread(method, _METHODS)
    try:
        return _METHODS[method](module, scheme, scales, rounds)
    except UnreadWeightsError as error:
        raise error.at(f"{error.where} of a checkpoint quantized with {method}") from None


def _stacked(module: nn.Module, stored: Mapping[str, StoredWeight]) -> dict[str, StoredWeight]:
    """Return the weights, with experts stacked; those of a layer must be stored alike."""
    weights = dict(stored)
    first: dict[str, str] = {}
    for linear in model_linears(module):
        name = f"{linear.name}.weight"
        if name == linear.weight:
            continue
        example = first.setdefault(linear.weight, name)
        if stored.get(name) != stored.get(example):
            formats = [stored[n].format if n in stored else "values" for n in (example, name)]
            raise UnsupportedError(
                "The experts of a layer must be stored alike",
                where=name,
                got=f"{formats[1]}, beside {formats[0]} of {example}",
                expected="one format for all experts of a layer",
                hint="Use the original checkpoint, in bfloat16 or float32",
            )
        if name in weights:
            weights[linear.weight] = weights.pop(name)
    return weights


def encodings_of(tensors: Iterable[Tensor], stored: Mapping[str, StoredWeight]) -> Encodings:
    """Return which parts of these weights the checkpoint stores differently than memory."""
    components: dict[str, Codec] = {}
    known: dict[str, Known] = {}
    whole = {tensor.name: tensor for tensor in tensors}
    for tensor in whole.values():
        if tensor.name not in stored:
            continue
        weight = stored[tensor.name]
        for part in weight.format.components:
            codec = weight.layout.codecs.get(part.suffix)
            if codec is not None:
                components[tensor.name + part.suffix] = codec
        for module, shape in _linears_of(tensor):
            for name, value in weight.layout.known(shape, weight.format.columns).items():
                if f"{module}.{name}" not in whole:
                    known[f"{module}.{name}"] = value
    return Encodings(components, known)


def _linears_of(tensor: Tensor) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the linear of a weight, or those of the experts of a stacked one, and their shapes."""
    stacked = list(linears_of(tensor.name, tensor.shape))
    if not stacked:
        yield tensor.name.rpartition(".")[0], tensor.shape
    for linear in stacked:
        yield linear.module, (linear.rows[1] - linear.rows[0], tensor.shape[2])
