"""The options of requests that the checkpoint's generation configuration sets."""

from __future__ import annotations

from typing import Any

from tpcompile.errors import UsageError
from tpcompile.serving.params import SamplingParams

_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""The fields of a generation configuration, and the options of a request."""


def sampling_defaults(config: Any) -> dict[str, Any]:
    """Return the options of `SamplingParams` for requests that do not set them.

    `config` is Hugging Face's `GenerationConfig`. Only values that it states count: its `do_sample`
    selects greedy decoding or a temperature of 1 unless a temperature is set.
    """
    stated = config.to_diff_dict()
    options = {
        option: stated[name] for name, option in _NAMES.items() if stated.get(name) is not None
    }
    if stated.get("do_sample"):
        options.setdefault("temperature", 1.0)
    elif stated.get("do_sample") is False:
        options["temperature"] = 0.0
    if options.get("top_k") == 0:
        options["top_k"] = None
    try:
        SamplingParams(**options)
    except UsageError as error:
        raise UsageError(
            f"The generation configuration of the model is not supported: {error.message}",
            got=error.got,
            hint="Correct its generation_config.json, or ignore it: serve --generation-config none",
        ) from error
    return options
