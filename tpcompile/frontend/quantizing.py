"""The configuration of a model whose weights are quantized while they are loaded.

It is that of the checkpoint of compressed-tensors which such a model saves.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from tpcompile.errors import UnsupportedError, UsageError
from tpcompile.ir.scheme import Integers, Scheme

log = logging.getLogger(__name__)


def quantized_config(module: Any, layers: str, scheme: Scheme) -> tuple[Any, dict[str, str]]:
    """Return the configuration of a model, quantized by a scheme, and its quantized weights.

    Each weight is mapped to the tensor that has its values. These are the weights of linears, below
    the path of the `layers` and of the head. Embeddings, norms, biases, and routers, which are no
    linears, stay. A linear whose columns are not whole groups gets a scale per row.
    """
    if getattr(module.config, "quantization_config", None) is not None:
        raise UsageError(
            "The weights of this checkpoint are quantized already",
            got=f"weights={_word(scheme.layers)!r}",
            hint="Omit weights to load them as they are stored, or pass the original checkpoint",
        )
    linears = {path: one for path, one in module.named_modules() if isinstance(one, nn.Linear)}
    head = module.get_output_embeddings()
    wanted: dict[str, Integers] = {}
    for path, linear in linears.items():
        if linear is head and scheme.head is not None:
            wanted[path] = scheme.head
        elif linear is not head and path.startswith(f"{layers}."):
            wanted[path] = scheme.layers
    if not any(linears[path] is not head for path in wanted):
        raise UnsupportedError(
            f"{type(module).__name__} has no weight that can be quantized",
            got="no linears in its layers",
            expected="layers that are made of linears",
        )
    uneven = [path for path, one in wanted.items() if not one.divides(linears[path].in_features)]
    _tell(uneven, linears, scheme.layers)
    wanted |= {path: replace(wanted[path], columns=0) for path in uneven}
    sources = {f"{path}.weight": _source(module, f"{path}.weight") for path in wanted}
    config = copy.deepcopy(module.config)
    config.quantization_config = _written(wanted, linears)
    if any(name != source for name, source in sources.items()):
        config.tie_word_embeddings = False
    return config, sources


def _tell(uneven: Sequence[str], linears: Mapping[str, nn.Linear], integers: Integers) -> None:
    if uneven:
        log.warning(
            "%d weights get a scale per row, since their columns are no multiple of %d, such as "
            "the %d columns of %s",
            len(uneven),
            integers.columns,
            linears[uneven[0]].in_features,
            uneven[0],
        )


def _source(module: nn.Module, name: str) -> str:
    """Return the name of the tensor that has the values of a weight: of a tied one, the other."""
    weight = module.get_parameter(name)
    named = module.named_parameters(remove_duplicate=False)
    return next((tied for tied, one in named if one is weight and tied != name), name)


def _written(quantized: Mapping[str, Integers], linears: Iterable[str]) -> dict[str, Any]:
    """Return the `quantization_config`: that of most linears, and the others by name."""
    (general, _), *others = Counter(quantized.values()).most_common()
    targets = {general: ["Linear"]}
    targets |= {one: [path for path, own in quantized.items() if own == one] for one, _ in others}
    groups = [_group(one, named) for one, named in targets.items()]
    return {
        "quant_method": "compressed-tensors",
        "format": _LAYOUT,
        "quantization_status": "compressed",
        "config_groups": {f"group_{number}": one for number, one in enumerate(groups)},
        "ignore": [path for path in linears if path not in quantized],
    }


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
