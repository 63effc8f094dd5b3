"""A graph rewriting compiler for Hugging Face Qwen models.

`tpcompile.compile(model, tp=2)` returns a model that runs, `tpcompile.schedule(model)` the program
of a decode step, `tpcompile.capture(model)` the raw graph, and `tpcompile.parse_graph(text)` a
graph from its text form. `tpcompile.quantize(model, "int4", directory)` writes a checkpoint in few
bits. Heavy modules such as torch and transformers are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tpcompile.errors import (
    CaptureError,
    CheckpointError,
    CompileError,
    PassError,
    RankError,
    RequestError,
    ShardingError,
    UnsupportedError,
    UsageError,
    VerifyError,
)
from tpcompile.libraries import library_errors

if TYPE_CHECKING:
    from tpcompile.api import capture, compile
    from tpcompile.frontend import Captured, parse_graph
    from tpcompile.quantizing import quantize
    from tpcompile.rewriting.manager import Stage
    from tpcompile.runtime.model import CompiledModel
    from tpcompile.scheduling import ScheduledStep, schedule
    from tpcompile.serving import Engine, SamplingParams, Structure

__version__ = "0.1.0"

_LAZY = {
    "compile": "tpcompile.api",
    "capture": "tpcompile.api",
    "Captured": "tpcompile.frontend",
    "parse_graph": "tpcompile.frontend",
    "CompiledModel": "tpcompile.runtime.model",
    "Engine": "tpcompile.serving",
    "SamplingParams": "tpcompile.serving",
    "ScheduledStep": "tpcompile.scheduling",
    "Stage": "tpcompile.rewriting.manager",
    "Structure": "tpcompile.serving",
    "quantize": "tpcompile.quantizing",
    "schedule": "tpcompile.scheduling",
}
_ROOMS = ("passes", "ir", "vm", "inspect", "backends", "runtime", "serving")

__all__ = [
    "CaptureError",
    "Captured",
    "CheckpointError",
    "CompileError",
    "CompiledModel",
    "Engine",
    "PassError",
    "RankError",
    "RequestError",
    "SamplingParams",
    "ScheduledStep",
    "ShardingError",
    "Stage",
    "Structure",
    "UnsupportedError",
    "UsageError",
    "VerifyError",
    "__version__",
    "capture",
    "compile",
    "parse_graph",
    "quantize",
    "schedule",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        with library_errors():
            return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _ROOMS:
        with library_errors():
            return importlib.import_module(f"tpcompile.{name}")
    raise AttributeError(f"module 'tpcompile' has no attribute {name!r}")
