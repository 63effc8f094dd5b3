"""The shell to trace: the user's modules without storage, with our attention and rotary ops.

The user's model is not modified. The shell is a deep copy. Its memo already contains
replacements: parameters without storage, a list of only the layers to trace, a leaf for the
rotary module, and a configuration that names our attention.
"""

from __future__ import annotations

import copy
import io
import logging
import sys
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from tpcompile.errors import CaptureError, CompileError, UnsupportedError
from tpcompile.frontend import experts, masks, mixers
from tpcompile.frontend.layers import Layers
from tpcompile.frontend.rotary import rotary_modules

INPUTS = {"input_ids": "T", "positions": "T", "starts": "S", "logit_rows": "R"}
"""The inputs of every graph, each with the symbol of its only extent.

`starts[i]` is the first token of sequence `i`, and its last entry is the number of tokens.
`logit_rows` are the tokens whose logits are returned."""

HIDDEN = "hidden_states"
"""The name of a layer's input, if it is not the first positional argument."""

_EXAMPLE = {"T": 7, "S": 4, "R": 3}
"""Lengths to trace with: all different, and above 1, since torch.export specializes 0 and 1."""


class StandIn(nn.Module):
    """Stand-in for a layer, with its plain attributes. By default it returns its input."""

    def __init__(
        self,
        layer: nn.Module,
        call: Callable[[Any, dict[Any, Any]], Any] = lambda hidden, _: hidden,
    ) -> None:
        super().__init__()
        self._call = call
        plain = {k: v for k, v in vars(layer).items() if isinstance(v, int | float | str)}
        vars(self).update({k: v for k, v in plain.items() if k not in vars(self)})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        arguments = dict(enumerate(args)) | kwargs
        hidden = arguments.pop(0) if args else arguments.pop(HIDDEN)
        return self._call(hidden, arguments)


def make_shell(
    module: nn.Module,
    layers: Layers,
    copied: Container[int],
    stand_in: Callable[[int, nn.Module], nn.Module] = lambda _, layer: StandIn(layer),
    *,
    untied: bool = False,
) -> nn.Module:
    """Copy the model with only these layers, and a stand-in for each of the others.

    If it is `untied`, its head has a weight of its own.
    """
    (rotary,) = rotary_modules(module).values()
    frequencies: Any = rotary.inv_freq
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        memo[id(tensor)] = _without_storage(tensor)
    memo[id(rotary)] = _RotaryLeaf(2 * frequencies.shape[-1])
    masks.register(_attention)
    experts.register()
    config: Any = copy.deepcopy(module.config)
    config._experts_implementation = experts.IMPLEMENTATION
    config.output_router_logits = False  # the logits and loss of routers are for training
    config._attn_implementation = masks.ATTENTION_ONLY if copied else masks.WITH_MASKS
    memo[id(module.config)] = config
    modules: Any = module.get_submodule(layers.path)
    memo[id(modules)] = nn.ModuleList(
        _copied(layer, memo, layers.mask_arguments[number])
        if number in copied
        else stand_in(number, layer)
        for number, layer in enumerate(modules)
    )
    shell: Any = copy.deepcopy(module, memo)
    if untied:
        head = shell.get_output_embeddings()
        head.weight = _without_storage(head.weight)
    return shell  # type: ignore[no-any-return]


def _copied(layer: nn.Module, memo: dict[int, Any], mask: int | str | None) -> nn.Module:
    copied = copy.deepcopy(layer, memo)
    if mask is not None:
        masks.hand_in(copied, mask)
    mixers.with_ops(copied)
    copied.register_forward_pre_hook(_mark_input, prepend=True, with_kwargs=True)
    return copied


def _mark_input(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make an alias of the layer's input, which is the first node of the layer in a trace."""
    if args:
        return (torch.ops.aten.alias(args[0]), *args[1:]), kwargs
    return args, kwargs | {HIDDEN: torch.ops.aten.alias(kwargs[HIDDEN])}


def export(shell: nn.Module) -> torch.export.ExportedProgram:
    """Trace the shell over a symbolic number of tokens.

    The cache of fake tensors is off: few ops run twice, so it would only cost time.
    """
    from torch._dynamo import config  # torch.export imports it too

    dynamic = {name: {0: torch.export.Dim.DYNAMIC} for name in INPUTS}
    uncached = config.patch(fake_tensor_cache_enabled=False)
    with as_capture_errors(shell), torch.no_grad(), uncached:
        return torch.export.export(
            TokenParallel(shell), example_inputs(), dynamic_shapes=dynamic, strict=False
        )


def example_inputs() -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.zeros(_EXAMPLE[symbol], dtype=torch.long, device="meta") for symbol in INPUTS.values()
    )


@contextmanager
def as_capture_errors(shell: nn.Module) -> Iterator[None]:
    """Convert exceptions of the model's code and of torch.export to tpcompile's errors.

    Fake tensors also log their exceptions, with a traceback, and torch.export prints the partial
    graph. Both would repeat the error, so they are suppressed. If there is no error, the output
    is passed on to stderr.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addFilter(_no_record)
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            yield
        if sys.stderr is not None:  # None where standard streams are closed
            sys.stderr.write(printed.getvalue())
    except CompileError as error:
        if error.where:
            raise
        raise error.at(type(shell).__name__) from error
    except Exception as error:
        if isinstance(error, GuardOnDataDependentSymNode) or _ITEM_OF_META in str(error):
            raise UnsupportedError(
                f"{type(shell).__name__} branches on values that it computes, "
                "as a mixture of experts does",
                expected="the same operations for all values",
            ) from error
        raise CaptureError(
            f"{type(shell).__name__} could not be traced",
            got=": ".join((type(error).__name__, *str(error).strip().splitlines()[:1])),
        ) from error
    finally:
        log.removeFilter(_no_record)


_ITEM_OF_META = "item() cannot be called on meta tensors"


def _no_record(record: logging.LogRecord) -> bool:
    return False


def _without_storage(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty


class _RotaryLeaf(nn.Module):
    """Leaf that replaces the model's rotary module during a trace."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        if position_ids.dim() == 3:
            position_ids = _only_row(position_ids)
        if position_ids.device != x.device:  # positions that are not on meta, for building masks
            position_ids = position_ids.to(x.device)
        return torch.ops.tpc.rotary(position_ids, self.width, x.dtype)


def _only_row(positions: torch.Tensor) -> torch.Tensor:
    """Return one of the equal rows of positions in several parts, as text has them."""
    if positions.stride(0) != 0:
        raise UnsupportedError(
            "The model rotates heads by positions in several parts that may differ",
            got=f"position_ids {list(positions.shape)}",
            expected="one position per token",
        )
    return positions[0]


class TokenParallel(nn.Module):
    """The model over a flat run of tokens, in which only attention separates sequences."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        starts: torch.Tensor,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        result = self.model(
            input_ids=input_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logit_rows,
            starts=starts,
        )
        logits: torch.Tensor = result.logits[0]
        return logits


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    starts: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Implement Hugging Face's attention interface (heads in dimension 1) with `tpc.attention`.

    `sliding_window` is ignored, as in eager attention: the mask decides. The mask's window is
    written into the graph when the graph is built.
    """
    name = type(module).__name__
    if not isinstance(attention_mask, masks.Mask):
        raise UnsupportedError(
            f"{name} was given a mask that the model built itself"
            if attention_mask is not None
            else f"{name} was given no mask, so tokens attend to later tokens too",
            expected="a decoder in which a token attends to itself and to earlier tokens",
        )
    extra = [key for key in ("softcap", "s_aux", "position_bias") if options.get(key) is not None]
    if extra:
        raise UnsupportedError(
            f"{name} uses {extra[0]} in its attention",
            expected="plain scaled dot-product attention",
        )
    _refuse_two_widths(name, query, value)
    if starts is None:
        raise UnsupportedError(
            f"{name} gets no keyword arguments from its layer, so it cannot tell the sequences of "
            "a batch apart",
            expected="layers that pass their keyword arguments on, such as those of Qwen3",
        )
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = module.layer_idx
    return torch.ops.tpc.attention(q, k, v, starts, scale, None, layer), None


def _refuse_two_widths(name: str, query: torch.Tensor, value: torch.Tensor) -> None:
    if query.shape[-1] != value.shape[-1]:
        raise UnsupportedError(
            f"{name} has heads of two widths "
            f"({query.shape[-1]} for queries and keys, {value.shape[-1]} for values)",
            expected="heads of one width",
        )
