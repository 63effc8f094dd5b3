"""The graph module of every stage, which generates its Python code on the first call."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tpcompile.errors import UsageError


class StageModule(fx.GraphModule):
    """A `GraphModule` that is cheap to create, since most graphs are inspected but never called.

    torch generates and compiles a module's Python code whenever its graph is set, which takes
    longer than all passes over a deep model. This class delays it until the first call, or the
    first use of `code`.
    """

    def recompile(self) -> Any:
        """Discard the Python code of the previous graph."""
        instance_class = type(self)  # torch gives every instance a class of its own
        if "forward" in vars(instance_class):
            del instance_class.forward

    def forward(self, *inputs: Any) -> Any:
        """Generate the Python code, which replaces this method, and call it."""
        has_data = any(isinstance(x, torch.Tensor) and not x.is_meta for x in inputs)
        if has_data and any(parameter.is_meta for parameter in self.parameters()):
            raise UsageError(
                "The parameters of a graph have shapes but no data",
                hint="Run a stage with Stage.run, or set the parameters of the module first",
            )
        super().recompile()
        return self.forward(*inputs)

    @property
    def code(self) -> str:
        if "forward" not in vars(type(self)):
            super().recompile()
        return super().code

    def __str__(self) -> str:
        return f"{type(self).__name__}\n{self.code}"

    def __reduce__(self) -> Any:
        plain = fx.GraphModule(self, self.graph)
        plain.meta = self.meta
        return plain.__reduce__()
