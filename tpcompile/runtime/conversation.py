"""A conversation with a model: messages by the chat template, and the KV cache of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from transformers import StoppingCriteria

from tpcompile.errors import UsageError
from tpcompile.runtime.cache_name import CACHE
from tpcompile.runtime.text import TextWriter, encode_chat


@dataclass(frozen=True)
class Answer:
    """The answer to a message."""

    text: str
    tokens: int
    room: int
    """The number of tokens that the answer could have."""


class Conversation:
    """Turns of a user and a model. Tokens that the KV cache holds are not computed again."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        system: str | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._model, self._tokenizer, self._system = model, tokenizer, system
        self._template_options = template_options or {}
        self.reset()

    def reset(self) -> None:
        """Forget all messages but the system's."""
        messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        self.messages: list[dict[str, str]] = messages
        self._cache, self._ids = self._model.new_cache(), list[int]()

    def answer(
        self,
        message: str,
        write: Callable[[str], None],
        stopped: Callable[[], bool] = lambda: False,
        max_new_tokens: int | None = None,
        **options: Any,
    ) -> Answer:
        """Add a user's message and the model's answer, which `write` receives word by word.

        The answer ends early once `stopped` returns true. `options` are those of Hugging Face's
        `generate`. If the call raises, the conversation is as before.
        """
        messages = [*self.messages, {"role": "user", "content": message}]
        ids = encode_chat(self._tokenizer, messages, **self._template_options)
        room = self._model.max_seq_len - len(ids)
        if room < 1:
            raise UsageError(
                "The conversation is too long",
                got=f"{len(ids)} tokens",
                expected=f"less than {self._model.max_seq_len}, which the model can take",
            )
        room = min(room, max_new_tokens or room)
        self._keep_common(ids)
        prompt = torch.tensor([ids], device=self._model.device)
        tokens = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            **{CACHE: self._cache},
            max_new_tokens=room,
            streamer=TextWriter(self._tokenizer, write, skip_prompt=True),
            stopping_criteria=[_Stop(stopped)],
            **options,
        )[0].tolist()
        self._ids = tokens[: self._cache.get_seq_length()]
        new = tokens[len(ids) :]
        text = str(self._tokenizer.decode(new, skip_special_tokens=True))
        self.messages = [*messages, {"role": "assistant", "content": text}]
        return Answer(text, len(new), room)

    def _keep_common(self, ids: list[int]) -> None:
        """Crop the cache to what the new ids begin with: a template may change earlier turns."""
        pairs = zip(self._ids, ids[:-1], strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if common:
            self._cache.crop(common)
        else:
            self._cache = self._model.new_cache()
        self._ids = self._ids[:common]


class _Stop(StoppingCriteria):
    """A criterion that ends an answer when a function says so."""

    def __init__(self, stopped: Callable[[], bool]) -> None:
        self._stopped = stopped

    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        return torch.full((len(input_ids),), self._stopped(), device=input_ids.device)
