"""Which layers of a model repeat, and which of them have to be traced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tpcompile.errors import UnsupportedError
from tpcompile.frontend.masks import Meaning


@dataclass(frozen=True)
class Layers:
    """The list of layers at `path`; layers of one kind are alike but for their weights."""

    path: str
    kinds: tuple[int, ...]
    masks: tuple[Meaning | None, ...] = ()
    """What the attention mask of each layer means, once that is known."""
    mask_arguments: tuple[int | str | None, ...] = ()
    """Which argument of each layer that mask is."""

    def traced(self) -> tuple[int, ...]:
        """The first layer, then the first of every kind among the others, and the last.

        The first layer is never a template: its input comes from the embedding, so only in
        those after it can the value that runs from layer to layer be told from the rest.
        """
        later = {self.kinds.index(kind, 1) for kind in self.kinds[1:]}
        return tuple(sorted({0, *later, len(self.kinds) - 1}))

    def all_different(self) -> Layers:
        """The same layers, none taken for a copy of another."""
        return replace(self, kinds=tuple(range(len(self.kinds))))

    def told_apart(self, marks: Sequence[Any]) -> Layers:
        """Layers stay of one kind only where their marks are equal too."""
        known: dict[Any, int] = {}
        pairs = zip(self.kinds, marks, strict=True)
        return replace(self, kinds=tuple(known.setdefault(pair, len(known)) for pair in pairs))

    def template(self, layer: int) -> int:
        """The traced layer that `layer` is a copy of."""
        return self.kinds.index(self.kinds[layer], 1) if layer else 0

    def renamed(self, name: str, source: int, target: int) -> str:
        """A module or tensor name of layer `source` as it is in layer `target`."""
        old, new = f"{self.path}.{source}", f"{self.path}.{target}"
        if name == old or name.startswith(old + "."):
            return new + name[len(old) :]
        return name

    def layer_of(self, name: str) -> int | None:
        """The layer that a module or tensor belongs to."""
        if not name.startswith(self.path + "."):
            return None
        return int(name[len(self.path) + 1 :].partition(".")[0])


def find_layers(module: nn.Module) -> Layers:
    """The longest list of modules in the model that is in no other list."""
    lists = outermost_lists(module)
    if not lists:
        raise UnsupportedError(f"{type(module).__name__} has no list of layers")
    path, modules = max(lists, key=lambda item: len(item[1]))
    if not len(modules):
        raise UnsupportedError(f"{type(module).__name__} has no layers", where=path)
    known: dict[Any, int] = {}
    kinds = tuple(known.setdefault(_signature(layer), len(known)) for layer in modules)
    return Layers(path, kinds)


def outermost_lists(module: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """Lists of modules that are in no other list, by path: experts of a layer are not layers."""
    found: list[tuple[str, nn.ModuleList]] = []
    for path, part in module.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer, _ in found)
        if isinstance(part, nn.ModuleList) and not inside:
            found.append((path, part))
    return found


def _signature(module: nn.Module) -> Any:
    """Everything about a layer that its trace can depend on, but for its number and weights."""
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
        plain = isinstance(value, int | float | str | bool | torch.dtype | None)
        yield name, value if plain else id(value)


def _hooks(module: nn.Module) -> tuple[int, ...]:
    """What users hung on the module; it runs when the module does."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return tuple(map(id, hooks))


_TORCH_OWN = frozenset(vars(nn.Module())) - {"training"}
"""What torch itself keeps on every module."""
