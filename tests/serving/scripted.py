"""A model that says what tests want: its choices are scripted, all else is real."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tpcompile.serving.sampling import Chosen, Sampler, described


@dataclass
class Scripts:
    """Texts to say, by the seeds of requests: one text per continuation."""

    tokenizer: Any
    texts: dict[int, Sequence[str]] = field(default_factory=dict)

    def say(self, *texts: str) -> dict[str, Any]:
        """Return fields of a body whose continuations say texts."""
        seed = len(self.texts)
        self.texts[seed] = texts
        return {"seed": seed, "temperature": 1}

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let samplers with a known seed choose the tokens of its text, and then the end."""
        choose = Sampler.choose

        def scripted(
            sampler: Any, logits: torch.Tensor, tokens: Sequence[int], *masks: Any
        ) -> Chosen:
            params = sampler._params
            texts = self.texts.get(params.seed)
            if texts is None:
                return choose(sampler, logits, tokens, *masks)
            script = self.tokens(texts[sampler._index])
            place = len(tokens) - sampler._prompt
            token = script[place] if place < len(script) else self.tokenizer.eos_token_id
            if params.logprobs is None:
                return Chosen(token)
            return described(token, logits, params.logprobs)

        monkeypatch.setattr(Sampler, "choose", scripted)
