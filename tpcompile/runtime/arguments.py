"""What callers of a compiled model may give, checked before anything is sent or written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tpcompile.errors import UnsupportedError, UsageError

_TAKEN = (
    "input_ids, attention_mask, position_ids, past_key_values, use_cache, logits_to_keep, "
    "return_dict"
)
_ID_DTYPES = (torch.int64, torch.int32)
"""The dtypes that an embedding takes."""


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call as plain tensors on the CPU."""

    input_ids: torch.Tensor
    """int64 [batch, length], all in the vocabulary."""
    attention_mask: torch.Tensor | None
    """Boolean, of two dimensions."""
    position_ids: torch.Tensor | None
    """int64 [batch or 1, length]."""
    columns: torch.Tensor
    """int64: the columns whose logits are wanted."""


def checked(
    input_ids: Any, attention_mask: Any, position_ids: Any, logits_to_keep: Any, vocabulary: int
) -> Arguments:
    """The arguments of a call, or the first thing that is wrong with them."""
    ids = check_ids(input_ids, vocabulary)
    return Arguments(
        ids,
        None if attention_mask is None else check_mask(attention_mask),
        None if position_ids is None else _check_positions(position_ids, ids),
        _columns(logits_to_keep, ids.shape[1]),
    )


def refuse_options(options: dict[str, Any]) -> None:
    """What Hugging Face's models take and this one does not; asking for nothing is no harm."""
    asked = [name for name, value in options.items() if value is not None and value is not False]
    if asked:
        raise UnsupportedError(f"A compiled model does not take {asked[0]}", expected=_TAKEN)


def refuse_code(custom_generate: Any, trust_remote_code: Any) -> None:
    """Code of a repository or a directory is never run; a function of the caller's own may be."""
    if custom_generate is not None and not callable(custom_generate):
        raise code_error(f"custom_generate={custom_generate!r}")
    if trust_remote_code:
        raise code_error(f"trust_remote_code={trust_remote_code!r}")


def code_error(got: str) -> UnsupportedError:
    return UnsupportedError(
        "A compiled model runs no generation code of a repository or a directory",
        got=got,
        hint="Pass a function of your own: custom_generate=FUNCTION",
    )


def refuse_padded_ends(mask: torch.Tensor | None) -> None:
    """Text goes on behind the last column; what a model says behind padding is no text."""
    if mask is None or bool(mask[:, -1].all()):
        return
    raise UsageError(
        "A sequence of the batch ends in padding, and nothing can be generated behind that",
        got="an attention_mask with a zero in its last column",
        expected="padding on the left",
        hint="Set tokenizer.padding_side = 'left'",
    )


def check_flag(name: str, value: Any) -> bool | None:
    """A switch that may be left out; also as 0 or 1."""
    if value is None or isinstance(value, bool | int):
        return None if value is None else bool(value)
    raise UsageError(f"{name} must be True, False or None", got=type(value).__name__)


def check_ids(input_ids: Any, vocabulary: int) -> torch.Tensor:
    """The ids as int64 on the CPU."""
    ids = _plain("input_ids", input_ids)
    if not ids.numel():
        raise UsageError("input_ids holds no tokens", got=f"shape {tuple(ids.shape)}")
    if ids.dtype not in _ID_DTYPES:
        raise UsageError(
            "input_ids must be whole numbers of 32 or 64 bits",
            got=str(ids.dtype),
            expected=" or ".join(map(str, _ID_DTYPES)),
        )
    if ids.dim() != 2:
        raise UsageError("input_ids must be [batch, length]", got=f"shape {tuple(ids.shape)}")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        raise UsageError(
            "input_ids holds a token that is not in the vocabulary",
            got=str(low if low < 0 else high),
            expected=f"0 to {vocabulary - 1}",
        )
    return ids.long()


def check_mask(attention_mask: Any) -> torch.Tensor:
    """The mask as booleans on the CPU: what is not zero is a token, as in Hugging Face's code."""
    mask = _plain("attention_mask", attention_mask)
    if mask.is_complex():
        raise UsageError("attention_mask must hold ones and zeros", got=str(mask.dtype))
    if mask.dim() == 4:
        raise UnsupportedError(
            "A compiled model does not take an attention_mask that says who sees whom",
            got=f"shape {tuple(mask.shape)}",
            expected="[batch, length], which marks padding",
        )
    if mask.dim() != 2:
        raise UsageError("attention_mask must be [batch, length]", got=f"shape {tuple(mask.shape)}")
    return mask.bool()


def _check_positions(position_ids: Any, ids: torch.Tensor) -> torch.Tensor:
    positions = _plain("position_ids", position_ids)
    if positions.dtype == torch.bool or positions.is_floating_point() or positions.is_complex():
        raise UsageError("position_ids must be whole numbers", got=str(positions.dtype))
    batch, length = ids.shape
    if tuple(positions.shape) not in ((batch, length), (1, length)):
        raise UsageError(
            "position_ids must give a position for each of input_ids",
            got=f"shape {tuple(positions.shape)}",
            expected=f"shape {(batch, length)} or {(1, length)}",
        )
    return positions.long()


def _columns(logits_to_keep: Any, length: int) -> torch.Tensor:
    """The columns that Hugging Face's code picks: the last so many, or those that are named."""
    chosen = logits_to_keep
    if isinstance(chosen, torch.Tensor):
        chosen = _plain("logits_to_keep", chosen)
        if chosen.dim() > 1:
            raise UnsupportedError(
                "logits_to_keep must name the same columns for every sequence",
                got=f"shape {tuple(chosen.shape)}",
                expected="a number, or a tensor of one dimension",
            )
    elif isinstance(chosen, int):
        chosen = slice(-chosen, None)
    try:
        return torch.arange(length)[None][:, chosen][0]
    except (IndexError, TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"logits_to_keep must be a number, or name columns of the {length} in input_ids",
            got=f"{logits_to_keep!r}: {error}",
        ) from error


def _plain(name: str, value: Any) -> torch.Tensor:
    """A tensor that holds numbers in the usual way, on the CPU."""
    if not isinstance(value, torch.Tensor):
        raise UsageError(f"{name} must be a tensor", got=type(value).__name__)
    found = _unusual(value)
    if found:
        raise UsageError(
            f"{name} must be a plain tensor, with a number in every place", got=f"{found} tensor"
        )
    return value.detach().cpu()


def _unusual(value: torch.Tensor) -> str:
    kinds = {
        "a nested": value.is_nested,
        f"a {value.layout}": value.layout != torch.strided,
        "a quantized": value.is_quantized,
        "a meta": value.is_meta,
        f"a {type(value).__name__}": type(value).__torch_dispatch__
        is not torch.Tensor.__torch_dispatch__,
    }
    return next((kind for kind, found in kinds.items() if found), "")
