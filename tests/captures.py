"""Captures that tests share: one of each configuration and dtype in a session.

Only for tests whose subject is not capture. Each caller gets a graph and a configuration of its
own. A model in memory is captured every time: it may have changed.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import nn

from tpcompile.frontend import Captured, capture, config_of
from tpcompile.frontend.source import name_of
from tpcompile.rewriting.manager import clone

_CAPTURED: dict[Any, Captured] = {}


def captured_once(
    model: Any, *, dtype: torch.dtype | None = None, stamped: bool = True
) -> Captured:
    """Capture a model; one with the same configuration is not captured again."""
    if isinstance(model, nn.Module):
        return capture(model, dtype=dtype, stamped=stamped)
    config = config_of(model)
    values = config.to_dict()
    values.pop("_name_or_path", None)
    key = (type(config), repr(sorted(values.items())), dtype, stamped)
    if key not in _CAPTURED:
        _CAPTURED[key] = capture(config, dtype=dtype, stamped=stamped)
    found = _CAPTURED[key]
    own = copy.deepcopy(found.config)
    own.name_or_path = config.name_or_path
    graph = clone(found.graph)
    graph.meta["tpcompile"] = dataclasses.replace(graph.meta["tpcompile"], name=name_of(model))
    return dataclasses.replace(found, graph=graph, config=own)
