"""Detection of model features that graphs cannot express, by the structure of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from tpcompile.errors import UnsupportedError
from tpcompile.frontend.experts import SUPPORTED, calls_interface, other_feature
from tpcompile.frontend.layers import outermost_lists
from tpcompile.frontend.mixers import is_linear_attention, looks_up
from tpcompile.frontend.rotary import frequencies_of, rotary_modules, table_feature

_LAYER_KINDS = ("full_attention", "sliding_attention", "linear_attention")
_ONE_TABLE = "one rotary table that all layers share"


@dataclass(frozen=True)
class Feature:
    """An unsupported feature: `description` completes the sentence "The model has …"."""

    description: str
    supported: str
    hint: str = ""


def refuse_features(module: nn.Module) -> None:
    """Raise one error that names the class and all of its unsupported features."""
    features = [feature for look in _LOOKS for feature in look(module)]
    if not features:
        return
    *most, last = [feature.description for feature in features]
    raise UnsupportedError(
        f"{type(module).__name__} has {', '.join(most) + ' and ' if most else ''}{last}",
        expected=", ".join(dict.fromkeys(feature.supported for feature in features)),
        hint=next((feature.hint for feature in features if feature.hint), ""),
    )


def _adapters(module: nn.Module) -> Iterator[Feature]:
    unmerged = [path for path, part in module.named_modules() if _is_unmerged(part)]
    if unmerged:
        yield Feature(
            f"unmerged adapters ({_first(unmerged)})",
            "weights without adapters",
            "Merge them first: model = model.merge_and_unload()",
        )
    if isinstance(getattr(module, "prompt_encoder", None), nn.Module):
        yield Feature(
            "virtual tokens of a prompt adapter (prompt_encoder)",
            "weights without adapters",
            "Compile the model without them: model.get_base_model()",
        )


def _is_unmerged(part: nn.Module) -> bool:
    """Return whether this is an adapter that changes the result of the matrix that it wraps."""
    wrapped = getattr(part, "base_layer", None)
    weight = getattr(wrapped, "weight", None)
    if not isinstance(wrapped, nn.Module) or weight is None or weight.dim() < 2:
        return False
    return not getattr(part, "merged", False) and not getattr(part, "disable_adapters", False)


def _layer_kinds(module: nn.Module) -> Iterator[Feature]:
    kinds = getattr(_config(module), "layer_types", None) or ()
    unsupported = sorted(set(kinds) - set(_LAYER_KINDS))
    if unsupported:
        yield Feature(
            f"layers of kind {'/'.join(unsupported)}", f"layers of kind {' or '.join(_LAYER_KINDS)}"
        )


def _linear_attention(module: nn.Module) -> Iterator[Feature]:
    nets = any(map(is_linear_attention, module.modules()))
    kinds = getattr(_config(module), "layer_types", None) or ()
    if "linear_attention" in kinds and not nets:
        yield Feature(
            "layers of kind linear_attention other than Qwen3.5's",
            "gated delta nets with one convolution for queries, keys and values",
        )
    if nets and not any(map(_calls_interface, module.modules())):
        yield Feature("linear attention in all of its layers", "at least one layer of attention")


def _rotary(module: nn.Module) -> Iterator[Feature]:
    rotaries = rotary_modules(module)
    if not rotaries:
        yield Feature(
            "no rotary position embedding", "a decoder that rotates its heads by position"
        )
    elif len(rotaries) > 1:
        yield Feature(f"{len(rotaries)} rotary modules ({_first(list(rotaries))})", _ONE_TABLE)
    for path, rotary in list(rotaries.items())[:1]:
        kinds = [name.removesuffix("_inv_freq") for name in frequencies_of(rotary)]
        if kinds != ["inv_freq"]:
            yield Feature(
                f"a rotary table per layer type ({', '.join(kinds)}) in {path}", _ONE_TABLE
            )
            continue
        tables = table_feature(rotary, _config(module))
        if tables:
            yield Feature(tables, "real cos and sin tables as wide as the rotated heads")


def _experts(module: nn.Module) -> Iterator[Feature]:
    """Yield experts that differ from the op, or that do not call Hugging Face's interface.

    The latter are stacked or listed MLPs with a router: a weight that reads the residual and has
    one row per MLP.
    """
    width = getattr(_config(module), "hidden_size", None)
    for path, layer in _repeated(module):
        routers = {
            len(weight)
            for name, weight in layer.named_parameters()
            if weight.dim() == 2 and weight.shape[1] == width and name.endswith("weight")
        }
        for name, part in layer.named_modules():
            feature = None
            if calls_interface(part):
                feature = other_feature(part)
            elif (count := _stacked(part)) in routers:
                feature = f"a mixture of {count} experts without Hugging Face's interface"
            if feature:
                yield Feature(f"{feature} ({path}.{name})", SUPPORTED)
                return


def _stacked(part: nn.Module) -> int:
    """Return the number of MLPs whose weights a module stacks or lists, or 0."""
    if isinstance(part, nn.ModuleList):
        same = len({type(child) for child in part}) == 1
        return len(part) if same and any(True for _ in part.parameters()) else 0
    if isinstance(part, nn.modules.conv._ConvNd):
        return 0
    return next(
        (p.shape[0] for p in part._parameters.values() if p is not None and p.dim() == 3), 0
    )


def _repeated(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the members of each outermost list of modules, with their paths."""
    for path, part in outermost_lists(module):
        for number, layer in enumerate(part):
            yield f"{path}.{number}", layer


def _head_widths(module: nn.Module) -> Iterator[Feature]:
    for path, part in module.named_modules():
        value = getattr(part, "v_head_dim", None)
        query = getattr(part, "qk_head_dim", None) or getattr(part, "head_dim", None)
        if isinstance(value, int) and isinstance(query, int) and value != query:
            widths = f"{query} for queries and keys, {value} for values"
            yield Feature(f"heads of two widths ({widths}) in {path}", "heads of one width")
            return


def _cross_attention(module: nn.Module) -> Iterator[Feature]:
    for path, part in module.named_modules():
        if getattr(part, "is_causal", True) is False:
            yield Feature(
                f"attention that is not causal ({path})",
                "attention in which a token attends to itself and to earlier tokens only",
            )
            return


def _interface(module: nn.Module) -> Iterator[Feature]:
    declared = getattr(module, "_supports_attention_backend", False)
    known = (_calls_interface, is_linear_attention)
    if not declared and not any(knows(part) for part in module.modules() for knows in known):
        yield Feature(
            "no attention that goes through Hugging Face's attention interface",
            "a decoder-only model whose attention can be replaced, such as Qwen2 or Qwen3",
        )


def _calls_interface(part: nn.Module) -> bool:
    """Return whether the forward of a module looks its attention up, as Qwen3.5's does."""
    return looks_up(part, "ALL_ATTENTION_FUNCTIONS")


_LOOKS: tuple[Callable[[nn.Module], Iterable[Feature]], ...] = (
    _adapters,
    _layer_kinds,
    _linear_attention,
    _rotary,
    _experts,
    _head_widths,
    _cross_attention,
    _interface,
)


def _config(module: nn.Module) -> Any:
    return module.config


def _first(paths: list[str]) -> str:
    remaining = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return paths[0] + remaining
