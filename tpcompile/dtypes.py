"""The names of dtypes and of integers, which are checked before torch is imported."""

from __future__ import annotations

import re

DTYPES = ("float32", "bfloat16", "float16")
DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""The short names of dtypes."""
AUTO_DTYPE = "auto"
"""The name that leaves the choice to the configuration."""

INTEGERS = ("int8", "int4")
"""The integers that weights can be quantized to."""
HEADS = (*INTEGERS, "keep")
"""The formats that the head can be quantized to; `keep` does not quantize it."""
ACTIVATIONS = ("16", "int8")
"""The dtypes of inputs of linears with weights in 8 to 4 bits; "16" is that of the model."""
KV = ("int8",)
"""The formats of the KV cache, besides the model's dtype."""
EXPERTS = ("auto", "tp", "ep")
"""The ways to shard experts: each of them is split, ranks hold whole ones, or the cheaper."""
GROUP_COLUMNS = 64
"""The default number of columns per group."""
GROUPS = ("32", "64", "128", "row")
"""Usual groups, for completion."""
_GRAIN, _MOST = 16, 1 << 15
_WEIGHTS = re.compile(rf"({'|'.join(INTEGERS)})(?::(row|[1-9]\d{{0,4}}))?", re.IGNORECASE)
WEIGHTS_FORM = (
    f"int8 or int4, optionally with the columns per group (a multiple of {_GRAIN}, as in int4:32) "
    "or with a scale per row (int8:row)"
)


def integers_of(word: str) -> tuple[str, int] | None:
    """Return the name and the columns per group of a word such as int4:32; 0 stands for rows.

    Return None for any other word.
    """
    match = _WEIGHTS.fullmatch(word)
    if match is None:
        return None
    name, group = match[1].lower(), match[2] or str(GROUP_COLUMNS)
    columns = 0 if group.lower() == "row" else int(group)
    return (name, columns) if columns % _GRAIN == 0 and columns < _MOST else None
