"""What callers of a compiled model may give, and how they are told that they may not."""

from __future__ import annotations

from typing import Any

import torch

from tpcompile.errors import UnsupportedError, UsageError


def refuse_options(options: dict[str, Any]) -> None:
    """What Hugging Face's models take and this one does not; asking for nothing is no harm."""
    asked = [name for name, value in options.items() if value is not None and value is not False]
    if asked:
        raise UnsupportedError(
            f"A compiled model does not take {asked[0]}",
            expected="input_ids, attention_mask, position_ids, past_key_values, use_cache, "
            "logits_to_keep",
        )


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


def check_ids(input_ids: torch.Tensor, vocabulary: int) -> None:
    if not isinstance(input_ids, torch.Tensor):
        raise UsageError("input_ids must be a tensor", got=type(input_ids).__name__)
    if not input_ids.numel():
        raise UsageError("input_ids holds no tokens", got=f"shape {tuple(input_ids.shape)}")
    if input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        raise UsageError("input_ids must be whole numbers", got=str(input_ids.dtype))
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= vocabulary:
        raise UsageError(
            "input_ids holds a token that is not in the vocabulary",
            got=str(low if low < 0 else high),
            expected=f"0 to {vocabulary - 1}",
        )
