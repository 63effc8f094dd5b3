"""The configuration of a model whose weights are quantized while they are loaded.

It is that of the compressed-tensors checkpoint that such a model saves.
"""

from __future__ import annotations

import copy
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from tpcompile.errors import UnsupportedError, UsageError
from tpcompile.frontend.experts import calls_interface
from tpcompile.frontend.linears import ModelLinear, head_of, model_linears
from tpcompile.ir.scheme import Integers, Scheme

log = logging.getLogger(__name__)


def quantized_config(module: Any, layers: str, scheme: Scheme) -> tuple[Any, dict[str, str]]:
    """Return the configuration of a model, quantized by a scheme, and its quantized weights.

    Each weight is mapped to the tensor that has its values. These are the weights of linears, below
    the path of the `layers` and of the head. Embeddings, norms, biases, routers, and linears of one
    row, which are gates, stay. A linear whose columns are not whole groups gets a scale per row.
    """
    if getattr(module.config, "quantization_config", None) is not None:
        raise UsageError(
            "The weights of this checkpoint are quantized already",
            got=f"weights={_word(scheme.layers)!r}",
            hint="Omit weights to load them as they are stored, or pass the original checkpoint",
        )
    linears = {linear.name: linear for linear in model_linears(module)}
    head = head_of(module)
    wanted: dict[str, Integers] = {}
    for path, linear in linears.items():
        if path == head and scheme.head is not None:
            wanted[path] = scheme.head
        elif path != head and path.startswith(f"{layers}.") and linear.shape[0] > 1:
            wanted[path] = scheme.layers
    if not any(path != head for path in wanted):
        raise UnsupportedError(
            f"{type(module).__name__} has no weight that can be quantized",
            got="no linears in its layers",
            expected="layers that are made of linears",
        )
    uneven = [
        path for path, integers in wanted.items() if not integers.divides(linears[path].shape[1])
    ]
    _tell([linears[path] for path in uneven], scheme.layers)
    wanted |= {path: replace(wanted[path], columns=0) for path in uneven}
    weights = dict.fromkeys(linears[path].weight for path in wanted)
    sources = {weight: _source(module, weight) for weight in weights}
    config = copy.deepcopy(module.config)
    config.quantization_config = _written(wanted, linears, _routers(module))
    if any(name != source for name, source in sources.items()):
        config.tie_word_embeddings = False
    return config, sources


def _tell(uneven: Sequence[ModelLinear], integers: Integers) -> None:
    if uneven:
        log.warning(
            "%d weights get a scale per row, since their columns are not a multiple of %d, such as "
            "the %d columns of %s",
            len(uneven),
            integers.columns,
            uneven[0].shape[1],
            uneven[0].name,
        )


def _routers(module: nn.Module) -> list[str]:
    """Return the names of routers, which are linears for other libraries."""
    parents = (
        path.rpartition(".")[0] for path, part in module.named_modules() if calls_interface(part)
    )
    return [f"{parent}.gate" for parent in parents if hasattr(module.get_submodule(parent), "gate")]


def _source(module: nn.Module, name: str) -> str:
    """Return the name of the tensor with a weight's values: the one it is tied to, or its own."""
    weight = module.get_parameter(name)
    named = module.named_parameters(remove_duplicate=False)
    return next((tied for tied, parameter in named if parameter is weight and tied != name), name)


def _written(
    quantized: Mapping[str, Integers], linears: Mapping[str, ModelLinear], routers: Sequence[str]
) -> dict[str, Any]:
    """Return the `quantization_config`: that of most linears, and the others by name."""
    (general, _), *special = Counter(quantized.values()).most_common()
    targets = {general: ["Linear"]}
    for integers, _ in special:
        names = (_target(linears[path]) for path, other in quantized.items() if other == integers)
        targets[integers] = list(dict.fromkeys(names))
    groups = [_group(integers, named) for integers, named in targets.items()]
    return {
        "quant_method": "compressed-tensors",
        "format": _LAYOUT,
        "quantization_status": "compressed",
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "ignore": [*(path for path in linears if path not in quantized), *routers],
    }


def _target(linear: ModelLinear) -> str:
    """Return a name or a regular expression: one for all experts of a layer."""
    if linear.weight == f"{linear.name}.weight":
        return linear.name
    return rf"re:{re.escape(linear.module)}\.\d+\.{linear.name.rpartition('.')[2]}$"


_LAYOUT = "pack-quantized"


def _group(integers: Integers, targets: list[str]) -> dict[str, Any]:
    weights = {
        "num_bits": integers.bits,
        "type": "int",
        "symmetric": True,
        "dynamic": False,
        "strategy": "group" if integers.columns else "channel",
        "group_size": integers.columns or None,
    }
    return {"targets": targets, "weights": weights, "input_activations": None, "format": _LAYOUT}


def _word(integers: Integers) -> str:
    return f"{integers.kind.word}:{integers.columns or 'row'}"
