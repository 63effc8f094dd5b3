"""Capture of a Hugging Face causal LM as a token-parallel graph, with an origin on every node."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from tpcompile.frontend.build import Builder
from tpcompile.frontend.experts import refuse_routers
from tpcompile.frontend.layers import Layers, find_layers
from tpcompile.frontend.masks import agreed_split
from tpcompile.frontend.quantizing import quantized_config
from tpcompile.frontend.record import unlike_layers
from tpcompile.frontend.rotary import RotaryTables, SavedTables, rotary_modules, source_of
from tpcompile.frontend.scales import scale_dtypes
from tpcompile.frontend.shell import INPUTS, export, make_shell
from tpcompile.frontend.source import config_of, module_of, name_of
from tpcompile.frontend.stored import encodings_of, stored_weights
from tpcompile.frontend.stored.layout import UnreadWeightsError
from tpcompile.frontend.watch import watch_layers
from tpcompile.ir import parse
from tpcompile.ir.check_biases import captured_biases
from tpcompile.ir.checker import infer_types
from tpcompile.ir.codec import NO_ENCODINGS, Encodings
from tpcompile.ir.format import Format
from tpcompile.ir.info import GraphInfo, info_of
from tpcompile.ir.ops import ROTARY
from tpcompile.ir.recipe import Tensor
from tpcompile.ir.scheme import Scheme
from tpcompile.ir.types import ValueType
from tpcompile.pause import paused_collector

__all__ = ["INPUTS", "Captured", "UnreadWeightsError", "capture", "config_of", "parse_graph"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Captured:
    """A captured model: the graph, and the other data that a runtime needs."""

    graph: fx.GraphModule
    config: Any
    rotary: RotaryTables
    """The graph's `rotary` module. Each rank uses a `fresh()` copy: some rope types keep state."""
    tensors: dict[str, Tensor] = field(repr=False)
    """The checkpoint tensors that the graph uses, by name."""
    aliases: dict[str, str] = field(repr=False)
    """Other names of tied tensors, mapped to the names in `tensors`."""
    packs: bool
    """Whether the model separates sequences packed into one row by their positions."""
    model: nn.Module | None = field(repr=False, default=None)
    """The user's model, if one was given; it has the weights."""
    encodings: Encodings = field(repr=False, default=NO_ENCODINGS)
    """The components of weights that the checkpoint stores differently than memory. For weights
    that are quantized while they are loaded, those of the checkpoint that would be saved."""
    quantized: Mapping[str, str] = field(repr=False, default_factory=dict)
    """The weights that are quantized while they are loaded, and the tensors with their values; for
    an untied head, the embedding."""
    ignored: tuple[str, ...] = ()
    """Regular expressions of the names of stored tensors that the model does not need."""


@paused_collector()
def capture(
    model: Any,
    *,
    dtype: torch.dtype | None = None,
    scheme: Scheme | None = None,
    rounds: bool = False,
    stamped: bool = True,
) -> Captured:
    """Capture MODEL: a `PreTrainedModel`, a config, `preset:NAME`, a path or a hub id.

    A `scheme` quantizes its weights while they are loaded. With `rounds`, linears with weights of
    few bits round their inputs to int8. `stamped=False` traces every layer, which takes longer and
    gives the same graph.
    """
    module = module_of(model, dtype)
    layers = find_layers(module)
    config, quantized = module.config, dict[str, str]()
    if scheme is not None:
        config, quantized = quantized_config(module, layers.path, scheme)
    scales = {} if scheme else scale_dtypes(model, config)
    stored = stored_weights(module, config, scales, rounds)
    formats = {name: weight.format for name, weight in stored.items()}
    tensors, aliases = _tensors(module, formats, quantized)
    encodings = encodings_of(tensors.values(), stored)
    untied = any(name != source for name, source in quantized.items())
    layers = watch_layers(module, layers)
    name = type(module).__name__
    (source,) = rotary_modules(module).values()
    rotary = RotaryTables(source, module.config)

    layers = layers if stamped else layers.all_different()

    def trace(layers: Layers) -> tuple[fx.GraphModule, ValueType]:
        traced = layers.traced()
        program = export(make_shell(module, layers, traced, untied=untied))
        gm = Builder(program, layers, traced, tensors, aliases, rotary, name).build()
        refuse_routers(gm.graph, name)
        return gm, infer_types(gm, name)

    gm, result = trace(layers)
    if unlike := unlike_layers(module, layers):
        log.info("layers %d and %d look alike, but compute differently: tracing every one", *unlike)
        gm, result = trace(layers.all_different())
    gm.meta["tpcompile"] = GraphInfo(
        name_of(model),
        tp=1,
        outputs=(result,),
        model=name,
        biases=captured_biases(gm.graph),
        rotary=source_of(source, module.config),
    )
    log.info("captured %s: %d nodes", name, len(gm.graph.nodes))
    user_model = module if isinstance(model, nn.Module) else None
    packs = agreed_split(filter(None, layers.masks), f"{name}.{layers.path}")
    ignored = tuple(getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ())
    return Captured(
        gm, config, rotary, tensors, aliases, packs, user_model, encodings, quantized, ignored
    )


def parse_graph(text: str, *, check: bool = True) -> fx.GraphModule:
    """Parse a graph from its text form and check it; it runs with the rotary tables of its model.

    With `check=False`, an invalid graph is returned too, for inspection.
    """
    gm = parse.parse_graph(text, check=check)
    gm.add_submodule(ROTARY, SavedTables(info_of(gm).rotary))
    return gm


def _tensors(
    module: nn.Module, formats: Mapping[str, Format], quantized: Mapping[str, str]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the distinct parameters by first name, and the other names of tied ones.

    Parameters that are quantized while they are loaded are tied to no other one.
    """
    first: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        known = name if name in quantized else first.setdefault(id(parameter), name)
        if known == name:
            tensors[name] = Tensor(name, tuple(parameter.shape), formats.get(name))
        else:
            aliases[name] = known
    return tensors, aliases
