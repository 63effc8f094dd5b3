"""Validation of the arguments of a compiled model, before anything is sent or written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tpcompile.errors import UnsupportedError, UsageError

_TAKEN = (
    "only input_ids, attention_mask, position_ids, past_key_values or cache, use_cache, "
    "logits_to_keep, return_dict and output_router_logits"
)
_ID_DTYPES = (torch.int64, torch.int32)
"""The dtypes that an embedding accepts."""


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call as plain tensors on the CPU."""

    input_ids: torch.Tensor
    """int64 [batch, length], all in the vocabulary."""
    attention_mask: torch.Tensor | None
    """Boolean, two-dimensional."""
    position_ids: torch.Tensor | None
    """int64 [batch or 1, length]."""
    columns: Sequence[int] | int
    """The columns whose logits are returned, or one whose logits have no dimension of columns."""


def checked(
    input_ids: Any, attention_mask: Any, position_ids: Any, logits_to_keep: Any, vocabulary: int
) -> Arguments:
    """Return the arguments of a call as tensors; raise for the first invalid one."""
    ids = check_ids(input_ids, vocabulary)
    return Arguments(
        ids,
        None if attention_mask is None else check_mask(attention_mask),
        None if position_ids is None else _check_positions(position_ids, ids),
        _columns(logits_to_keep, ids.shape[1]),
    )


def refuse_options(options: dict[str, Any]) -> None:
    """Raise for arguments that only Hugging Face's models accept; None and False are ignored."""
    names = [name for name, value in options.items() if value is not None and value is not False]
    if names:
        raise UnsupportedError(
            f"A compiled model does not support the argument {names[0]}", expected=_TAKEN
        )


def refuse_code(custom_generate: Any, trust_remote_code: Any) -> None:
    """Raise if code of a repository or a directory would run; a function as argument is allowed."""
    if custom_generate is not None and not callable(custom_generate):
        raise code_error(f"custom_generate={custom_generate!r}")
    if trust_remote_code:
        raise code_error(f"trust_remote_code={trust_remote_code!r}")


def code_error(got: str) -> UnsupportedError:
    """Return the error for generation code that a repository or a directory supplies."""
    return UnsupportedError(
        "A compiled model does not run generation code from a repository or a directory",
        got=got,
        hint="Pass your own function: custom_generate=FUNCTION",
    )


def refuse_padded_ends(mask: torch.Tensor | None) -> None:
    """Raise if a row ends in padding: generation continues after the last column."""
    if mask is None or bool(mask[:, -1].all()):
        return
    raise UsageError(
        "The last column of attention_mask must not be padding: generation continues after it",
        got="a zero in the last column",
        expected="padding on the left",
        hint="Set tokenizer.padding_side = 'left'",
    )


def check_flag(name: str, value: Any) -> bool | None:
    """Return a flag as a bool, or None if it is None; integers are converted."""
    if value is None or isinstance(value, bool | int):
        return None if value is None else bool(value)
    raise UsageError(f"{name} must be True, False or None", got=type(value).__name__)


def check_ids(input_ids: Any, vocabulary: int) -> torch.Tensor:
    """Return the ids as int64 on the CPU, or raise if they are invalid."""
    ids = _plain("input_ids", input_ids)
    if not ids.numel():
        raise UsageError("input_ids must hold at least one token", got=f"shape {tuple(ids.shape)}")
    if ids.dtype not in _ID_DTYPES:
        raise UsageError(
            "input_ids must be 32-bit or 64-bit integers",
            got=str(ids.dtype),
            expected=" or ".join(map(str, _ID_DTYPES)),
        )
    if ids.dim() != 2:
        raise UsageError(
            "input_ids must have shape [batch, length]", got=f"shape {tuple(ids.shape)}"
        )
    low, high = (int(end) for end in torch.aminmax(ids))
    if low < 0 or high >= vocabulary:
        raise UsageError(
            "Every token of input_ids must be in the vocabulary",
            got=str(low if low < 0 else high),
            expected=f"0 to {vocabulary - 1}",
        )
    return ids.long()


def check_mask(attention_mask: Any) -> torch.Tensor:
    """Return the mask as booleans on the CPU; nonzero marks a token, as in Hugging Face."""
    mask = _plain("attention_mask", attention_mask)
    if mask.is_complex():
        raise UsageError("attention_mask must hold ones and zeros", got=str(mask.dtype))
    if mask.dim() == 4:
        raise UnsupportedError(
            "A compiled model does not support an attention_mask of query-key pairs",
            got=f"shape {tuple(mask.shape)}",
            expected="[batch, length], which marks padding",
        )
    if mask.dim() != 2:
        raise UsageError(
            "attention_mask must have shape [batch, length]", got=f"shape {tuple(mask.shape)}"
        )
    return mask.bool()


def _check_positions(position_ids: Any, ids: torch.Tensor) -> torch.Tensor:
    positions = _plain("position_ids", position_ids)
    if positions.dtype == torch.bool or positions.is_floating_point() or positions.is_complex():
        raise UsageError("position_ids must be integers", got=str(positions.dtype))
    batch, length = ids.shape
    if tuple(positions.shape) not in ((batch, length), (1, length)):
        raise UsageError(
            "position_ids must hold one position for each of input_ids",
            got=f"shape {tuple(positions.shape)}",
            expected=f"shape {(batch, length)} or {(1, length)}",
        )
    return positions.long()


def check_lengths(starts: torch.Tensor, most: int) -> None:
    """Raise if a sequence of packed tokens is longer than `most`. A KV cache checks this itself."""
    longest = int(starts.diff().max())
    if longest > most:
        raise UsageError(
            f"A sequence must have at most max_seq_len={most} tokens",
            got=f"{longest} tokens",
            hint=f"Compile with max_seq_len={longest} or more",
        )


def _columns(logits_to_keep: Any, length: int) -> Sequence[int] | int:
    """Return the columns that Hugging Face's code picks: the last n, or the given indices."""
    chosen = logits_to_keep
    if isinstance(chosen, int):
        return range(length)[-chosen:]
    if isinstance(chosen, torch.Tensor):
        chosen = _plain("logits_to_keep", chosen)
        if chosen.dim() > 1:
            raise UnsupportedError(
                "logits_to_keep must select the same columns for every sequence",
                got=f"shape {tuple(chosen.shape)}",
                expected="an integer, or a one-dimensional tensor",
            )
    try:
        columns: list[int] | int = torch.arange(length)[None][:, chosen][0].tolist()
    except (IndexError, TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"logits_to_keep must be an integer, or indices of the {length} columns of input_ids",
            got=f"{logits_to_keep!r}: {error}",
        ) from error
    return columns


def _plain(name: str, value: Any) -> torch.Tensor:
    """Return a dense, unquantized tensor on the CPU; raise for any other kind."""
    if not isinstance(value, torch.Tensor):
        raise UsageError(f"{name} must be a tensor", got=type(value).__name__)
    for unusual, kind in _UNUSUAL:
        if unusual(value):
            raise UsageError(
                f"{name} must be a dense, unquantized tensor with data",
                got=f"a {kind(value)} tensor",
            )
    return value.detach().cpu()


_UNUSUAL: tuple[tuple[Callable[[Any], bool], Callable[[Any], object]], ...] = (
    (lambda value: value.is_nested, lambda value: "nested"),
    (lambda value: value.layout != torch.strided, lambda value: value.layout),
    (lambda value: value.is_quantized, lambda value: "quantized"),
    (lambda value: value.is_meta, lambda value: "meta"),
    (
        lambda value: type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__,
        lambda value: type(value).__name__,
    ),
)
"""Kinds of tensors without plain values, and their names in messages."""
