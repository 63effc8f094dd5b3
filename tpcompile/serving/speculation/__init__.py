"""Guesses of next tokens, which a step computes as rows: they change no token, only the time."""

from __future__ import annotations

from tpcompile.errors import UnsupportedError, UsageError
from tpcompile.runtime.model import CompiledModel
from tpcompile.serving.speculation.drafters import Drafter, Wanted
from tpcompile.serving.speculation.model import ModelDrafter
from tpcompile.serving.speculation.prompt import PromptDrafter
from tpcompile.serving.speculation.speculation import Speculation

__all__ = ["Drafter", "ModelDrafter", "PromptDrafter", "Speculation", "Wanted", "speculation_of"]

_MOST = 8
"""The maximum number of guesses of a step by default."""


def speculation_of(
    speculate: str | CompiledModel | Drafter | None, model: CompiledModel
) -> Speculation | None:
    """Return the guesses for an engine of a model; None for none."""
    if speculate is None:
        return None
    if not model.computes_rows:
        raise UnsupportedError(
            "Speculation needs a model whose program computes several tokens of a sequence",
            got=f"backend={model.backend!r}",
            expected="backend='native', 'triton' or 'reference'",
        )
    if isinstance(speculate, str):
        return Speculation(PromptDrafter(prompt_guesses(speculate)), model.guesses)
    if isinstance(speculate, CompiledModel):
        return Speculation(ModelDrafter(speculate, model, _MOST), model.guesses)
    return Speculation(speculate, model.guesses)


def prompt_guesses(text: str) -> int:
    """Return the number of guesses in `prompt:8`, by default 8."""
    kind, _, number = text.partition(":")
    if kind != "prompt" or (number and not (number.isdecimal() and 1 <= int(number) <= 15)):
        raise UsageError(
            "Guesses from the text must be prompt:N, with N from 1 to 15", got=repr(text)
        )
    return int(number) if number else _MOST
