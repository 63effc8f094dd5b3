"""Guesses of a smaller model, which continues each sequence greedily."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch

from tpcompile.errors import UnsupportedError, UsageError
from tpcompile.runtime.cache_name import CACHE
from tpcompile.runtime.kv.cache import PagedCache
from tpcompile.runtime.model import CompiledModel
from tpcompile.serving.speculation.drafters import Wanted


@dataclass
class _Text:
    """A sequence of the draft model."""

    cache: PagedCache
    tokens: list[int] = field(default_factory=list)
    """The tokens in the cache."""


class ModelDrafter:
    """Guesses of a compiled model with the same vocabulary. It is closed by its owner."""

    free = False

    def __init__(self, draft: CompiledModel, model: CompiledModel, most: int) -> None:
        """Raise unless `draft` can guess the tokens of `model`."""
        sizes = draft.config.vocab_size, model.config.vocab_size
        if sizes[0] != sizes[1]:
            raise UsageError(
                "A draft model must have the vocabulary of the model",
                got=f"{sizes[0]:,} tokens",
                expected=f"{sizes[1]:,} tokens",
            )
        if draft.keeps_states:
            raise UnsupportedError(
                "A draft model must not have linear attention, whose states cannot go back",
                hint="Use a draft model with attention alone, or guesses from the text: prompt:8",
            )
        self.most, self._draft = most, draft
        self._texts: dict[Hashable, _Text] = {}

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        """Return the greedy continuation of each sequence."""
        return [self._continue(each) for each in wanted]

    def forget(self, key: Hashable) -> None:
        """Drop the cache of a sequence."""
        self._texts.pop(key, None)

    def _continue(self, wanted: Wanted) -> list[int]:
        room = self._draft.max_seq_len - len(wanted.tokens)
        most = min(wanted.most, room)
        if most < 1:
            return []
        if wanted.key not in self._texts:
            cache = self._draft.new_cache()
            cache.temporary = True
            self._texts[wanted.key] = _Text(cache)
        text = self._texts[wanted.key]
        self._catch_up(text, wanted.tokens)
        guesses: list[int] = []
        token = wanted.tokens[-1]
        while len(guesses) < most:
            inputs = {"input_ids": torch.tensor([[token]]), CACHE: text.cache}
            steps = self._draft.steps_ahead(inputs, (), most - len(guesses))
            new = self._steps(inputs, steps)
            text.tokens += [token, *new[:-1]]
            guesses += new
            token = new[-1]
        return guesses

    def _steps(self, inputs: dict[str, object], steps: int) -> list[int]:
        """Return the tokens of greedy steps."""
        if steps > 1:
            ended = torch.zeros(1, dtype=torch.bool)
            return self._draft.launch(inputs, ended, steps, ())[:, 0].tolist()
        tokens: list[int] = self._draft(**inputs, greedy=True, return_dict=True).tokens.tolist()
        return tokens

    def _catch_up(self, text: _Text, tokens: Sequence[int]) -> None:
        """Let the cache hold all tokens but the last: drop wrong guesses, and compute new ones."""
        last = len(tokens) - 1
        kept = min(len(text.tokens), last)
        while kept and text.tokens[kept - 1] != tokens[kept - 1]:
            kept -= 1
        if kept < len(text.tokens):
            text.cache.crop(kept - len(text.tokens))
        missing = list(tokens[kept:last])
        text.tokens = list(tokens[:last])
        if not missing:
            return
        self._draft(
            input_ids=torch.tensor([missing]),
            logits_to_keep=1,
            return_dict=True,
            **{CACHE: text.cache},
        )
