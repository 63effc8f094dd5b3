"""Captured graphs shared by tests in a session, for tests whose subject is not capture.

Each caller gets its own copy. Two models share a capture if they agree in all that capture can
see: configuration, modules with their attributes and hooks, names and shapes of parameters, and
values of small buffers. Models that differ in the formats of weights alone share a trace, which
takes most of the time of a capture.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tpcompile import frontend
from tpcompile.frontend import Captured, capture, config_of
from tpcompile.frontend.scales import scale_dtypes
from tpcompile.frontend.source import name_of
from tpcompile.ir.scheme import Scheme
from tpcompile.rewriting.manager import clone

_CAPTURED: dict[Any, Captured] = {}
_TRACED: dict[Any, torch.export.ExportedProgram] = {}
_MOST_NUMBERS = 4096
"""The maximum size of a buffer compared by value: rotation tables are below it."""


def captured_once(
    model: Any,
    *,
    dtype: torch.dtype | None = None,
    scheme: Scheme | None = None,
    rounds: bool = False,
    stamped: bool = True,
) -> Captured:
    """Capture a model, or return a copy of an earlier capture of an equal model."""
    in_memory = isinstance(model, nn.Module)
    config = model.config if in_memory else config_of(model)
    values = config.to_dict()
    values.pop("_name_or_path", None)
    attributes = tuple(_seen(model)) if in_memory else ()
    wanted = dtype or config.dtype or torch.get_default_dtype()
    scales = tuple(scale_dtypes(model, config).items())
    told = repr(sorted(values.items(), key=str))
    key = (type(config), told, wanted, scheme, rounds, stamped, attributes, scales)
    if key not in _CAPTURED:
        for unseen in ("dtype", "quantization_config"):
            values.pop(unseen, None)
        told = repr(sorted(values.items(), key=str))
        traced = (type(config), told, wanted, attributes)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(frontend, "export", _traced_once(traced, frontend.export))
            _CAPTURED[key] = capture(
                model, dtype=dtype, scheme=scheme, rounds=rounds, stamped=stamped
            )
    captured = _CAPTURED[key]
    graph = clone(captured.graph)
    graph.meta["tpcompile"] = dataclasses.replace(graph.meta["tpcompile"], name=name_of(model))
    if in_memory and scheme is None:
        return dataclasses.replace(captured, graph=graph, config=config, model=model)
    if in_memory:
        config_copy = copy.deepcopy(captured.config)
        return dataclasses.replace(captured, graph=graph, config=config_copy, model=model)
    config_copy = copy.deepcopy(captured.config)
    config_copy.name_or_path = config.name_or_path
    return dataclasses.replace(captured, graph=graph, config=config_copy)


def _traced_once(
    key: Any, export: Callable[[nn.Module], torch.export.ExportedProgram]
) -> Callable[[nn.Module], torch.export.ExportedProgram]:
    """Return `export`, which traces shells with the same modules and as many parameters once.

    Models of one key have other layers in their shells, or heads that are tied or not.
    """

    def traced(shell: nn.Module) -> torch.export.ExportedProgram:
        names = tuple(name for name, _ in shell.named_modules())
        full_key = key, names, sum(1 for _ in shell.parameters())
        if full_key not in _TRACED:
            _TRACED[full_key] = export(shell)
        return _TRACED[full_key]

    return traced


def share_captures(patch: pytest.MonkeyPatch) -> None:
    """Replace `capture` by `captured_once` in all rooms that capture models."""
    from tpcompile import api, exploring, quantizing, scheduling
    from tpcompile.compare import model as compare
    from tpcompile.compare import source as sides
    from tpcompile.compare.program import case

    patch.setattr(api, "captured_of", captured_once)
    for module in (frontend, compare, sides, case, exploring, quantizing, scheduling):
        patch.setattr(module, "capture", captured_once)


def _seen(model: nn.Module) -> Iterator[Any]:
    for name, module in model.named_modules():
        yield name, type(module), tuple(_attributes(module))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, tuple(parameter.shape), parameter.dtype, parameter.device.type
    ties = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    yield tuple(ties.index(address) for address in ties)
    for name, buffer in model.named_buffers():
        small = buffer.numel() <= _MOST_NUMBERS and not buffer.is_meta
        yield name, tuple(buffer.shape), buffer.dtype, repr(buffer.tolist()) if small else ""


def _attributes(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield a module's other attributes, including hooks."""
    for name, value in sorted(vars(module).items()):
        if name not in ("_parameters", "_buffers", "_modules", "config"):
            yield name, repr(value)
