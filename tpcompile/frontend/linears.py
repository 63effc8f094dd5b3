"""The linears of a model, with those of the experts that Hugging Face stacks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tpcompile.frontend.experts import calls_interface
from tpcompile.ir.stacked import linears_of


@dataclass(frozen=True)
class ModelLinear:
    """A linear, as checkpoints name it. Its weight may be a part of a stacked one."""

    name: str
    weight: str
    """The name of the parameter that has its weight."""
    shape: tuple[int, int]
    dtype: torch.dtype
    classes: tuple[str, ...]
    """The names of its classes, the most specific one first."""

    @property
    def module(self) -> str:
        """The name of the module that has the parameter."""
        return self.weight.rpartition(".")[0]


def model_linears(module: Any) -> Iterator[ModelLinear]:
    """Yield the linears of a model in the order of its modules, except routers."""
    for path, part in module.named_modules():
        if isinstance(part, nn.Linear):
            shape = (part.out_features, part.in_features)
            classes = class_names(type(part))
            yield ModelLinear(path, f"{path}.weight", shape, part.weight.dtype, classes)
        elif calls_interface(part):
            classes = class_names(nn.Linear)
            for name, parameter in part.named_parameters(prefix=path, recurse=False):
                for linear in linears_of(name, parameter.shape):
                    shape = (linear.rows[1] - linear.rows[0], parameter.shape[2])
                    yield ModelLinear(linear.module, name, shape, parameter.dtype, classes)


def class_names(kind: type) -> tuple[str, ...]:
    """Return the names of a class and of its bases, the most specific one first."""
    return tuple(base.__name__ for base in kind.__mro__)


def head_of(module: Any) -> str:
    """Return the name of the head of a model."""
    head = module.get_output_embeddings()
    return next(str(path) for path, part in module.named_modules() if part is head)
