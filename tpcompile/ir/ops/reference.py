"""The expressions of ops from their references, which are run on expressions.

The reference is the meaning of an op. So a pass that raises ATen calls to an op is correct if the
op's reference makes the same calls. References that read elements cannot be run on expressions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from tpcompile.ir.ops.composite import Operand, value_of_body
from tpcompile.ir.ops.spec import SPECS
from tpcompile.ir.values.build import ValueRule

aten = torch.ops.aten

_FUNCTIONS: dict[Any, Any] = {
    torch.rsqrt: aten.rsqrt.default,
    torch.cat: aten.cat.default,
    torch.stack: aten.stack.default,
    functional.silu: aten.silu.default,
    functional.softplus: aten.softplus.default,
}
"""The ops of functions that references call."""


class Traced(Operand):
    """An expression that has the methods of a tensor that references call."""

    @classmethod
    def __torch_function__(
        cls, target: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        target = _FUNCTIONS.get(target, target)
        args = tuple(SPECS[target].bind(args, _without_inplace(kwargs)).values())
        first = next(
            operand
            for arg in args
            for operand in (arg if isinstance(arg, list | tuple) else (arg,))
            if isinstance(operand, cls)
        )
        return first.called(target, *args)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, tuple):
            return super().__getitem__(key)
        _, part = key  # `[..., start:stop:step]` is the only other form
        start, stop, step = part.indices(self.shape[-1])
        return self.called(aten.slice.Tensor, self, -1, start, stop, step)

    def __sub__(self, other: Any) -> Any:
        return self.called(aten.sub.Tensor, self, other)

    def __radd__(self, other: Any) -> Any:
        return self + other

    def __neg__(self) -> Any:
        return self.called(aten.neg.default, self)

    def float(self) -> Any:
        return self.to(torch.float32)

    def pow(self, exponent: Any) -> Any:
        return self.called(aten.pow.Tensor_Scalar, self, exponent)

    def mean(self, dim: int, keepdim: bool) -> Any:
        return self.called(aten.mean.dim, self, [dim], keepdim)

    def sum(self, dim: int, keepdim: bool) -> Any:
        return self.called(aten.sum.dim_IntList, self, [dim], keepdim)

    def exp(self) -> Any:
        return self.called(aten.exp.default, self)

    def unsqueeze(self, dim: int) -> Any:
        return self.called(aten.unsqueeze.default, self, dim)

    def chunk(self, count: int, dim: int) -> Any:
        return self.called(aten.chunk.default, self, count, dim)

    def reshape(self, *shape: Any) -> Any:
        return self.called(aten.reshape.default, self, shape)

    def flatten(self, start: int) -> Any:
        return self.called(aten.flatten.using_ints, self, start, -1)

    def transpose(self, first: int, second: int) -> Any:
        return self.called(aten.transpose.int, self, first, second)

    def repeat_interleave(self, count: int, dim: int) -> Any:
        return self.called(aten.repeat_interleave.self_int, self, count, dim)


def _without_inplace(kwargs: Any) -> dict[str, Any]:
    """Return the keyword arguments of torch's function that the op also has."""
    return {name: arg for name, arg in (kwargs or {}).items() if name != "inplace"}


def value_of_reference(reference: Callable[..., Any]) -> ValueRule:
    """Return the rule that runs a reference on expressions."""
    return value_of_body(reference, Traced)
