"""Records of the torch calls in layers, which show whether layers of one kind compute the same."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tpcompile.frontend.layers import Layers, layer_argument
from tpcompile.frontend.shell import (
    HIDDEN,
    TokenParallel,
    as_capture_errors,
    example_inputs,
    make_shell,
)


def unlike_layers(module: nn.Module, layers: Layers) -> tuple[int, int] | None:
    """Return two layers of a kind, the first and the last, that make different calls, or None.

    The first one is traced and stands for all. Running both on meta takes a small part of the time
    of a trace.
    """
    pairs = layers.first_and_last()
    if not pairs:
        return None
    shell = make_shell(module, layers, set(chain(*pairs)))
    modules: Any = shell.get_submodule(layers.path)
    recorder = _Recorder()
    records = {number: recorder.record_of(modules[number]) for number in chain(*pairs)}
    with as_capture_errors(shell), torch.no_grad(), recorder:
        TokenParallel(shell)(*example_inputs())
    unlike = (pair for pair in pairs if records[pair[0]].calls != records[pair[1]].calls)
    return next(unlike, None)


class _Record:
    """The calls of a layer: its tensors by their roles, and other tensors by their identities."""

    def __init__(self, layer: nn.Module) -> None:
        tensors = (*layer.named_parameters(), *layer.named_buffers())
        self.calls: list[Any] = []
        self._names: dict[int, Any] = {id(tensor): name for name, tensor in tensors}
        self._live_objects: list[Any] = []  # identities of live objects are unique

    def name(self, value: Any, role: Any) -> None:
        """Name a tensor, or each of several, unless it has a name."""
        for place, item in enumerate(value if isinstance(value, list | tuple) else (value,)):
            self._names.setdefault(id(item), (role, place))

    def add(self, func: Any, operands: Mapping[Any, Any], result: Any) -> None:
        """Add a call. The number of the layer is not an operand."""
        self._live_objects.append((operands, result))
        self.calls.append((func, self._comparable(operands)))
        self.name(result, len(self.calls))

    def _comparable(self, value: Any) -> Any:
        """Return a value in a form that is comparable across layers."""
        if isinstance(value, torch.Tensor):
            return self._names.get(id(value), id(value))
        if isinstance(value, list | tuple):
            return [self._comparable(item) for item in value]
        if isinstance(value, dict):
            return {key: self._comparable(item) for key, item in value.items()}
        if isinstance(value, slice):
            return self._comparable((value.start, value.stop, value.step))
        return value


class _Recorder(TorchFunctionMode):
    """A mode that adds the calls of torch to the record of the layer that makes them."""

    def __init__(self) -> None:
        super().__init__()
        self._record: _Record | None = None

    def record_of(self, layer: nn.Module) -> _Record:
        """Return the record of a layer, which is filled when the layer runs."""
        record = _Record(layer)

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            record.name(args[0] if args else kwargs[HIDDEN], "hidden")
            self._record = record

        def leave(_: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            record.add("return", {0: result}, None)
            self._record = None

        layer.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        layer.register_forward_hook(leave)
        return record

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._record is not None:
            operands = dict(enumerate(args)) | (kwargs or {})
            operands.pop(layer_argument(getattr(func, "default", func)), None)
            self._record.add(func, operands, result)
        return result
