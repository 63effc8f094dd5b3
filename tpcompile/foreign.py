"""Arguments of other libraries, such as `from_pretrained`'s: the error names ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from tpcompile.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")

_WEIGHTS = 'Pass weights="int8" or weights="int4" to quantize weights while they are loaded'
_LOCAL = "Download the checkpoint first, and pass its directory as MODEL"
_RANKS = "Pass tp, the number of ranks"
_NOT_NEEDED = "Leave it out"

_INSTEAD = {
    "torch_dtype": "Pass dtype instead",
    "device_map": 'Pass device="cuda" or device="cpu", and tp for several ranks',
    "max_memory": _RANKS,
    "tp_size": _RANKS,
    "tp_plan": _RANKS,
    "tensor_parallel_size": _RANKS,
    "quantization_config": _WEIGHTS,
    "load_in_4bit": _WEIGHTS,
    "load_in_8bit": _WEIGHTS,
    "kv_cache_dtype": 'Pass kv="int8" for a cache in 8 bits',
    "max_model_len": "Pass max_seq_len instead",
    "max_length": "Pass max_seq_len for the size of the cache, or max_new_tokens to generate",
    "attn_implementation": f"{_NOT_NEEDED}: tpcompile has its own attention",
    "low_cpu_mem_usage": f"{_NOT_NEEDED}: a rank reads only its own part of the weights",
    "trust_remote_code": f"{_NOT_NEEDED}: code of repositories never runs",
    "use_cache": f"{_NOT_NEEDED}, or pass it to generate",
    "config": "Pass the configuration as MODEL",
    "revision": _LOCAL,
    "cache_dir": _LOCAL,
    "token": _LOCAL,
    "subfolder": _LOCAL,
}
"""What to do instead, by argument of `from_pretrained`, or of a server's engine."""


def refuse_foreign(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to refuse arguments of other libraries by a sentence that names ours."""

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name, value in kwargs.items():
            if name in _INSTEAD:
                raise UsageError(
                    f"tpcompile.{function.__name__} has no argument {name}",
                    got=f"{name}={value!r}",
                    hint=_INSTEAD[name],
                )
        return function(*args, **kwargs)

    return checked
