"""Finding the repeated layers of a model, and choosing the layers to trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tpcompile.alike import kinds_of
from tpcompile.errors import UnsupportedError
from tpcompile.frontend.masks import Meaning
from tpcompile.ir.ops import SPECS


@dataclass(frozen=True)
class Layers:
    """The list of layers at `path`. Layers of one kind differ only in their weights."""

    path: str
    kinds: tuple[int, ...]
    masks: tuple[Meaning | None, ...] = ()
    """The meaning of each layer's attention mask; empty until the layers have been watched."""
    mask_arguments: tuple[int | str | None, ...] = ()
    """The argument that holds the mask, by layer: a position, a name, or None."""

    def traced(self) -> tuple[int, ...]:
        """Return the layers to trace: the first of every kind."""
        return tuple(map(self.kinds.index, dict.fromkeys(self.kinds)))

    def first_and_last(self) -> tuple[tuple[int, int], ...]:
        """Return the first and the last layer of every kind that has several."""
        last = {kind: layer for layer, kind in enumerate(self.kinds)}
        pairs = ((self.kinds.index(kind), layer) for kind, layer in last.items())
        return tuple((first, layer) for first, layer in pairs if first != layer)

    def all_different(self) -> Layers:
        """Return the same layers, each of its own kind."""
        return replace(self, kinds=tuple(range(len(self.kinds))))

    def told_apart(self, marks: Sequence[Any]) -> Layers:
        """Split each kind by the marks of its layers."""
        return replace(self, kinds=kinds_of(zip(self.kinds, marks, strict=True)))

    def template(self, layer: int) -> int:
        """Return the traced layer that `layer` is a copy of."""
        return self.kinds.index(self.kinds[layer])

    def renamed(self, name: str, source: int, target: int) -> str:
        """Translate a module or tensor name from layer `source` to layer `target`."""
        old, new = f"{self.path}.{source}", f"{self.path}.{target}"
        if name == old or name.startswith(old + "."):
            return new + name[len(old) :]
        return name

    def layer_of(self, name: str) -> int | None:
        """Return the layer that a module or tensor belongs to, or None."""
        if not name.startswith(self.path + "."):
            return None
        return int(name[len(self.path) + 1 :].partition(".")[0])


def find_layers(module: nn.Module) -> Layers:
    """Return the layers: the longest of the model's outermost lists of modules."""
    lists = outermost_lists(module)
    if not lists:
        raise UnsupportedError(f"{type(module).__name__} has no list of layers")
    path, modules = max(lists, key=lambda item: len(item[1]))
    if not len(modules):
        raise UnsupportedError(f"{type(module).__name__} has no layers", where=path)
    return Layers(path, kinds_of(map(_signature, modules)))


def layer_argument(op: Any) -> int | None:
    """Return the position of the argument that holds the layer's number, if an op has one."""
    names = SPECS[op].argument_names if op in SPECS else ()
    return names.index("layer") if "layer" in names else None


def outermost_lists(module: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """Return the lists of modules that are in no other list: a layer's experts are not layers."""
    lists: list[tuple[str, nn.ModuleList]] = []
    for path, part in module.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer, _ in lists)
        if isinstance(part, nn.ModuleList) and not inside:
            lists.append((path, part))
    return lists


def _signature(module: nn.Module) -> Any:
    """Return everything that a layer's trace can depend on, except its number and weights."""
    return tuple(
        (name, type(part), tuple(_tensors(part)), tuple(_settings(part)), _hooks(part))
        for name, part in module.named_modules()
    )


def _tensors(module: nn.Module) -> Iterable[Any]:
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        yield name, tensor is None or (tuple(tensor.shape), tensor.dtype)


def _settings(module: nn.Module) -> Iterable[Any]:
    for name, value in vars(module).items():
        if name == "layer_idx" or name in _TORCH_OWN:
            continue
        yield name, value if _is_plain(value) else id(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, int | float | str | bool | torch.dtype | None)


def _hooks(module: nn.Module) -> tuple[int, ...]:
    """Return the identities of the user's hooks, which run when the module does."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return tuple(map(id, hooks))


_TORCH_OWN = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that torch sets on every module."""
