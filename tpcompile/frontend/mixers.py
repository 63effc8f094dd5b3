"""Linear attention in a shell: the functions that compute with earlier tokens become ops.

Hugging Face has no registry of such functions, as it has for attention. A layer calls them by
names of its module, and the chunked delta rule loops over tokens. So the copy of a layer that is
traced runs the code of its forward with other globals. Hugging Face's module stays as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from tpcompile.errors import UnsupportedError

CHUNK = "torch_chunk_gated_delta_rule"
"""The delta rule of several tokens, and of a new sequence."""
RECURRENT = "torch_recurrent_gated_delta_rule"
"""The delta rule of one more token."""
CONV = "causal_conv1d_fn"
"""The convolution of several tokens, and of a new sequence. It is given the inputs."""
UPDATE = "causal_conv1d_update"
"""The convolution of one more token. It is given the token and the earlier inputs, which it
updates."""


def is_linear_attention(module: nn.Module) -> bool:
    """Return whether a module is a gated delta net: its forward calls its functions by name."""
    return looks_up(module, CHUNK, CONV)


def looks_up(module: nn.Module, *names: str) -> bool:
    """Return whether the forward of a module looks all of these names up."""
    code = getattr(_forward(module), "__code__", None)
    return code is not None and set(names) <= set(code.co_names)


def with_ops(module: nn.Module) -> None:
    """Make every gated delta net in a module of a shell call ops."""
    for part in module.modules():
        if is_linear_attention(part):
            vars(part)["forward"] = forward_with(
                part, {name: partial(replacement, part) for name, replacement in _INSTEAD.items()}
            )


def forward_with(module: nn.Module, replacements: Mapping[str, Any]) -> MethodType:
    """Return the forward of a module, with other functions under these names."""
    forward = _forward(module)
    function = FunctionType(
        forward.__code__,
        forward.__globals__ | replacements,
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    function.__kwdefaults__ = forward.__kwdefaults__
    return MethodType(function, module)


def function_of(module: nn.Module, name: str) -> Any:
    """Return the function that the forward of a module looks up under this name."""
    return _forward(module).__globals__[name]


def _forward(module: nn.Module) -> Any:
    return inspect.unwrap(type(module).forward)


def _causal_conv(
    module: Any,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    starts: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Implement `causal_conv1d_fn`, whose channels are dimension 1, with `tpc.causal_conv`."""
    if activation not in ("silu", "swish"):
        raise UnsupportedError(
            f"{type(module).__name__} applies {activation} after its convolution", expected="silu"
        )
    x, layer = hidden_states.transpose(1, 2), module.layer_idx
    mixed = torch.ops.tpc.causal_conv(x, weight.unsqueeze(1), bias, starts, layer)
    return mixed.transpose(1, 2)  # type: ignore[no-any-return]


def _delta_rule(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    starts: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Implement `torch_chunk_gated_delta_rule` with `tpc.gated_delta_rule`."""
    if not use_qk_l2norm_in_kernel:
        raise UnsupportedError(
            f"{type(module).__name__} does not normalise its queries and keys",
            expected="use_qk_l2norm_in_kernel=True",
        )
    mixed = torch.ops.tpc.gated_delta_rule(query, key, value, g, beta, starts, module.layer_idx)
    return mixed, None


def _no_step(module: nn.Module, *_: Any, **__: Any) -> Any:
    raise UnsupportedError(
        f"{type(module).__name__} computes a step of one token while it is traced",
    )


_INSTEAD: dict[str, Callable[..., Any]] = {
    CONV: _causal_conv,
    CHUNK: _delta_rule,
    UPDATE: _no_step,
    RECURRENT: _no_step,
}
