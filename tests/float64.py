"""Models in fp64, also where their code computes in fp32 whatever the dtype of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

T = TypeVar("T")


class _Float64(TorchFunctionMode):
    """Compute in fp64 where code asks for fp32."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        widened = {name: _wide(value) for name, value in (kwargs or {}).items()}
        result = func(*map(_wide, args), **widened)
        assert not isinstance(result, torch.Tensor) or result.dtype != torch.float32, func
        return result


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def in_float64(model: Any, compute: Callable[[Any], T]) -> T:
    """Return what is computed with a copy of a model in fp64, with the same weights."""
    wide = deepcopy(model).double()
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64():
            return compute(wide)
    finally:
        torch.set_default_dtype(default)
