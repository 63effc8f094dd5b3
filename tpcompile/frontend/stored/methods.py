"""The method that quantized a checkpoint, and the refusal of methods that are not read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tpcompile.frontend.stored.layout import ORIGINAL, UnreadWeightsError
from tpcompile.json_files import shortened

_SIGNS = {
    "bitsandbytes": ("load_in_8bit", "load_in_4bit"),
    "MLX": ("group_size", "bits"),
}
"""The properties that reveal the method of a configuration without a `quant_method`."""


def method_of(scheme: Mapping[str, Any]) -> str:
    """Return the method of a `quantization_config`, or an empty string if it is unknown."""
    method = scheme.get("quant_method")
    if method is not None:
        return method if isinstance(method, str) else shortened(repr(method))
    signs = _SIGNS.items()
    return next((name for name, keys in signs if any(key in scheme for key in keys)), "")


def unread(method: str, known: Iterable[str]) -> UnreadWeightsError:
    """Return the error for a checkpoint quantized with a method other than the `known` ones."""
    quantized = f"quantized with {method}" if method else "quantized with an unnamed method"
    return UnreadWeightsError(
        f"The weights of this checkpoint are {quantized}, which tpcompile does not read",
        where="quantization_config.quant_method",
        got=repr(method) if method else "no method",
        expected=f"one of {', '.join(known)}",
        hint=ORIGINAL,
    )
