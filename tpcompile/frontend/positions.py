"""The longest sequence that the positions of a configuration allow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tpcompile.errors import UsageError


def longest_of(config: Any, max_seq_len: int | None = None) -> int:
    """Return the tokens of the longest sequence: `max_seq_len`, by default the configuration's.

    Raise if the positions of the configuration do not allow it. Beyond `max_position_embeddings`,
    the configuration's own scaling counts: `factor` times `original_max_position_embeddings`, or
    times `max_position_embeddings` where the rotary embedding follows the length ("dynamic").
    """
    stated: int = config.max_position_embeddings
    if max_seq_len is None:
        return stated
    scalings = _scalings(getattr(config, "rope_parameters", None))
    limit = max([stated, *(_scaled(parameters, stated) for parameters in scalings)])
    if max_seq_len > limit:
        raise UsageError(
            f"max_seq_len must be at most {limit:,}, the positions that the configuration allows",
            got=f"{max_seq_len:,}",
            hint="Longer sequences need a scaling of the rotary embedding that the model was made "
            "for: state its rope_type, factor and original_max_position_embeddings in config.json",
        )
    return max_seq_len


def _scalings(parameters: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the parameters of rotary embeddings, which may be stated per type of layer."""
    if isinstance(parameters, Mapping):
        yield parameters
        for value in parameters.values():
            yield from _scalings(value)


def _scaled(parameters: Mapping[str, Any], stated: int) -> int:
    unscaled = stated if parameters.get("rope_type") == "dynamic" else 0
    unscaled = parameters.get("original_max_position_embeddings") or unscaled
    return int((parameters.get("factor") or 1) * unscaled)
