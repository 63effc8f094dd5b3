"""Guesses of next tokens, which a step computes as rows: they change no token, only the time."""

from __future__ import annotations

from tpcompile.errors import UnsupportedError
from tpcompile.guesses import MOST_GUESSES, prompt_guesses
from tpcompile.runtime.model import CompiledModel
from tpcompile.serving.speculation.drafters import Drafter, Wanted
from tpcompile.serving.speculation.model import ModelDrafter
from tpcompile.serving.speculation.prompt import PromptDrafter
from tpcompile.serving.speculation.speculation import Speculation

__all__ = ["Drafter", "ModelDrafter", "PromptDrafter", "Speculation", "Wanted", "speculation_of"]


def speculation_of(
    speculate: str | CompiledModel | Drafter | None, model: CompiledModel
) -> Speculation | None:
    """Return the speculation for an engine of a model; None if it is disabled."""
    if speculate is None:
        return None
    if not model.computes_rows:
        raise UnsupportedError(
            "Speculation needs a model whose program computes several tokens of a sequence",
            got=f"backend={model.backend!r}",
            expected="backend='native', 'triton' or 'reference'",
        )
    drafter: Drafter
    if isinstance(speculate, str):
        drafter = PromptDrafter(prompt_guesses(speculate))
    elif isinstance(speculate, CompiledModel):
        drafter = ModelDrafter(speculate, model, MOST_GUESSES)
    else:
        drafter = speculate
    return Speculation(drafter, model.guesses, model.config.vocab_size)
