"""The two names of the KV cache in Hugging Face's interface.

It is `cache` since transformers 5.24, and was `past_key_values` before. A compiled model takes
both, and uses the installed version's name for what it passes on and returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from transformers.modeling_outputs import CausalLMOutputWithPast

from tpcompile.errors import UsageError

NAMES: Final = ("cache", "past_key_values")
CACHE: Final = next(
    name for name in NAMES if name in {field.name for field in fields(CausalLMOutputWithPast)}
)
"""The name in the installed version of transformers."""


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a call, under either name, or None."""
    caches = [arguments[name] for name in NAMES if arguments.get(name) is not None]
    if len(caches) > 1:
        raise UsageError(
            f"{' and '.join(NAMES)} are two names of one argument, got both", hint="Pass one"
        )
    return caches[0] if caches else None


def renamed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call with the cache under the installed version's name."""
    remaining = {name: value for name, value in arguments.items() if name not in NAMES}
    if len(remaining) == len(arguments):
        return remaining
    return {**remaining, CACHE: given_cache(arguments)}
