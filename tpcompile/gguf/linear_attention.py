"""Linear attention in GGUF files: its properties, and the conversions of its tensors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tpcompile.errors import CheckpointError, UnsupportedError
from tpcompile.gguf.conversions import LOGARITHM, Heads, Order, Transform
from tpcompile.gguf.file import GgufTensor
from tpcompile.gguf.kinds import GgufKind
from tpcompile.gguf.metadata import BLOCKS, ROTATED, Metadata

_INTERVAL, _RECURRENT = "full_attention_interval", "attention.recurrent_layers"
_SECTIONS = "rope.dimension_sections"
_TAPS, _KEY_WIDTH = "ssm.conv_kernel", "ssm.state_size"
_KEYS, _VALUES = "ssm.group_count", "ssm.time_step_rank"
_VALUE_WIDTHS = "ssm.inner_size"
WORDS = (_INTERVAL, _RECURRENT, _TAPS, _KEY_WIDTH, _KEYS, _VALUES, _VALUE_WIDTHS)
"""The properties that are read here."""
SECTIONED_WORDS = (*WORDS, _SECTIONS)
"""The same, and the property of several numbers per position."""
_DEFAULT_INTERVAL = 4


def properties(metadata: Metadata) -> dict[str, Any]:
    """Return the properties of the layers in the configuration of transformers."""
    keys, values = _heads(metadata)
    widths = metadata.count(_VALUE_WIDTHS)
    if widths % values:
        metadata.refuse(_VALUE_WIDTHS, f"a multiple of {values}, the value heads")
    return {
        "layer_types": _layer_types(metadata),
        "linear_conv_kernel_dim": metadata.count(_TAPS),
        "linear_key_head_dim": metadata.count(_KEY_WIDTH),
        "linear_value_head_dim": widths // values,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
    }


def _heads(metadata: Metadata) -> tuple[int, int]:
    """Return the numbers of key heads and of value heads."""
    keys, values = metadata.count(_KEYS), metadata.count(_VALUES)
    if values % keys:
        metadata.refuse(_VALUES, f"a multiple of {keys}, the key heads")
    return keys, values


def _layer_types(metadata: Metadata) -> list[str]:
    linear = metadata.array(_RECURRENT, bool)
    if linear is None:
        interval = metadata.count(_INTERVAL, _DEFAULT_INTERVAL)
        linear = [bool((layer + 1) % interval) for layer in range(metadata.layers())]
    elif len(linear) != metadata.count(BLOCKS):
        metadata.refuse(_RECURRENT, f"one for each of {metadata.count(BLOCKS)} blocks")
    return [
        "linear_attention" if flag else "full_attention" for flag in linear[: metadata.layers()]
    ]


def rotation(metadata: Metadata, width: int) -> dict[str, Any]:
    """Return the parameters of rotary tables for a part of a head."""
    rotated = metadata.count(ROTATED, width)
    if rotated > width or rotated % 2:
        metadata.refuse(ROTATED, f"an even number up to the width of a head, {width}")
    share = rotated / width
    if int(width * share) < rotated:  # as transformers computes it
        share = math.nextafter(share, 1.0)
    return {"partial_rotary_factor": share}


def rotation_in_sections(metadata: Metadata, width: int) -> dict[str, Any]:
    """Return such parameters, and those of several numbers per position."""
    parameters = {**rotation(metadata, width), "mrope_interleaved": True}
    sections = metadata.array(_SECTIONS, int)
    if sections is not None:
        if len(sections) not in (3, 4) or min(sections) < 0 or any(sections[3:]):
            metadata.refuse(_SECTIONS, "three numbers of at least 0, optionally followed by a 0")
        parameters["mrope_section"] = sections[:3]
    return parameters


def of_value_heads(
    metadata: Metadata, name: str, tensor: GgufTensor, axis: int = 0, *, after_keys: bool = False
) -> GgufTensor:
    """Return a tensor with the order of its value heads along an axis.

    Value heads of one key head are neighbours in transformers. llama.cpp stores the first value
    head of each key head, then the second of each, and so on. With `after_keys`, queries and keys
    are before the values.
    """
    keys, values = _heads(metadata)
    if keys == values:
        return tensor
    first = 2 * keys * metadata.count(_KEY_WIDTH) if after_keys else 0
    extent = tensor.shape[axis] - first
    if extent < 1 or extent % values:
        raise CheckpointError(
            f"The tensor {name} must have whole value heads",
            where=str(tensor.path),
            got=f"the shape {list(tensor.shape)}",
            expected=f"{first} and a multiple of {values} along axis {axis}",
        )
    columns = tensor.kind.block.columns
    if axis == -1 and extent // values % columns:
        raise UnsupportedError(
            f"The value heads of {name} cannot be read in the order of transformers",
            where=str(tensor.path),
            got=f"blocks of {columns} columns ({tensor.kind.name}), and {extent // values} columns "
            "of a head",
            expected="whole blocks in each head",
            hint="Use a checkpoint of Hugging Face, or a file with this tensor in Q8_0 or F32",
        )
    return replace(tensor, order=Order(axis, 1, values // keys, keys, first))


def taps(metadata: Metadata, name: str, tensor: GgufTensor) -> GgufTensor:
    """Return the taps of a convolution with the dimension that llama.cpp leaves out."""
    return _with_middle(of_value_heads(metadata, name, tensor, after_keys=True))


def taps_as_stored(metadata: Metadata, name: str, tensor: GgufTensor) -> GgufTensor:
    """Return the taps of a convolution whose channels are in the order of transformers."""
    return _with_middle(tensor)


def _with_middle(tensor: GgufTensor) -> GgufTensor:
    return replace(tensor, shape=(tensor.shape[0], 1, *tensor.shape[1:]))


def with_gates(metadata: Metadata, name: str, channels: GgufTensor) -> GgufTensor:
    """Return the projection of queries, keys, values and gates, which transformers has as one."""
    gates = metadata.tensor(name.replace("attn_qkv", "attn_gate"))
    keys = _heads(metadata)[0]
    width, per_key = metadata.count(_KEY_WIDTH), metadata.count(_VALUE_WIDTHS) // keys
    widths = (width, width, per_key, per_key)
    where = f"{name} and the tensor of its gates"
    if channels.kind != gates.kind:
        raise UnsupportedError(
            f"{where} must be stored alike",
            where=str(channels.path),
            got=f"{channels.kind.name} and {gates.kind.name}",
            expected="one kind: transformers has one projection of both",
            hint="Use a file in one quantization, such as Q8_0 or BF16",
        )
    shapes = ((keys * sum(widths[:3]),), (keys * per_key,))
    if (channels.shape[:1], gates.shape[:1]) != shapes or channels.shape[1:] != gates.shape[1:]:
        raise CheckpointError(
            f"{where} must have the rows of all heads",
            where=str(channels.path),
            got=f"the shapes {list(channels.shape)} and {list(gates.shape)}",
            expected=f"{shapes[0][0]} and {shapes[1][0]} rows of the same columns",
        )
    rows = channels.shape[0] + gates.shape[0]
    return replace(
        channels,
        shape=(rows, *channels.shape[1:]),
        order=Heads(keys, widths),
        parts=(channels, gates),
    )


def decay(metadata: Metadata, name: str, tensor: GgufTensor) -> GgufTensor:
    """Return the logarithms of the decay of each value head."""
    return transformed(metadata, name, of_value_heads(metadata, name, tensor), LOGARITHM)


def transformed(
    metadata: Metadata, name: str, tensor: GgufTensor, transform: Transform
) -> GgufTensor:
    """Return a tensor whose values are made from the stored ones."""
    if tensor.kind != GgufKind.F32:
        raise CheckpointError(
            f"The tensor {name} must be in fp32",
            where=str(tensor.path),
            got=tensor.kind.name,
            expected=GgufKind.F32.name,
        )
    return replace(tensor, transform=transform)
