"""Guesses of a smaller model, which continues all sequences greedily, together."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from tpcompile.errors import UsageError
from tpcompile.runtime.kv.cache import Appended, PagedCache
from tpcompile.runtime.kv.joined import append_all
from tpcompile.runtime.model import CompiledModel
from tpcompile.runtime.ranks.step import Step
from tpcompile.serving.speculation.drafters import Wanted

_MOST_TOKENS = 512
"""The maximum number of pending tokens of several sequences in a step."""


@dataclass
class _Text:
    """A sequence of the draft model."""

    cache: PagedCache
    tokens: list[int] = field(default_factory=list)
    """The tokens in the cache."""


@dataclass
class _Continued:
    """A sequence that is continued by guesses."""

    text: _Text
    pending: list[int]
    """The tokens to compute next."""
    most: int
    guesses: list[int] = field(default_factory=list)

    @property
    def missing(self) -> int:
        """The number of guesses to come."""
        return self.most - len(self.guesses)

    def add(self, new: Sequence[int]) -> None:
        """Add guesses. All tokens before the last of them are in the cache now."""
        self.text.tokens += [*self.pending, *new[:-1]]
        self.guesses += new
        self.pending = [new[-1]]


class ModelDrafter:
    """Guesses of a compiled model with the same vocabulary. It is closed by its owner.

    A step computes the next tokens of several sequences. Keys and values of wrong guesses are
    dropped from the cache. States of linear attention cannot be rolled back, so guesses are
    computed in a copy of the cache, and the right ones again in the cache itself.
    """

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
        self.most, self._draft = most, draft
        self._texts: dict[Hashable, _Text] = {}

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        """Return the greedy continuation of each sequence."""
        continued = [self._begun(request) for request in wanted]
        size = self._draft.max_batch or len(continued)
        for first in range(0, len(continued), size):
            self._continue(continued[first : first + size])
        return [sequence.guesses[: sequence.most] for sequence in continued]

    def forget(self, key: Hashable) -> None:
        """Drop the cache of a sequence."""
        self._texts.pop(key, None)

    def _begun(self, wanted: Wanted) -> _Continued:
        """Drop wrong guesses from the cache of a sequence; return the tokens to compute."""
        most = max(0, min(wanted.most, self._draft.max_seq_len - len(wanted.tokens)))
        text = self._texts.get(wanted.key)
        if text is None:
            text = self._texts[wanted.key] = _Text(self._draft.new_cache())
        common = min(len(text.tokens), len(wanted.tokens) - 1)
        while common and text.tokens[common - 1] != wanted.tokens[common - 1]:
            common -= 1
        if common < len(text.tokens):
            common = 0 if self._draft.keeps_states else common
            text.cache.crop(common - len(text.tokens))
            del text.tokens[common:]
        return _Continued(text, list(wanted.tokens[common:]), most)

    def _continue(self, batch: Sequence[_Continued]) -> None:
        """Compute pending tokens, and then guesses until each sequence has enough."""
        active = [sequence for sequence in batch if sequence.missing > 0]
        for part in self._parts(active):
            self._step(part)
        if self._draft.keeps_states:
            for sequence in active:
                sequence.text = copy.deepcopy(sequence.text)
        while active := [sequence for sequence in active if sequence.missing > 0]:
            missing = max(sequence.missing for sequence in active)
            room = min(sequence.text.cache.room for sequence in active)
            self._steps(active, min(missing, room, self._draft.most_steps()))

    def _parts(self, batch: Sequence[_Continued]) -> Iterator[list[_Continued]]:
        """Yield the sequences of each step that computes pending tokens in the cache itself.

        A sequence with a single one is left to the launch of all, unless another's step has room.
        With states, all pending tokens are computed before the cache is copied.
        """
        parts: list[list[_Continued]] = []
        for sequence in sorted(batch, key=lambda sequence: -len(sequence.pending)):
            tokens = sum(len(other.pending) for other in parts[-1]) if parts else _MOST_TOKENS
            if tokens + len(sequence.pending) > _MOST_TOKENS:
                parts.append([])
            parts[-1].append(sequence)
        for part in parts:
            if self._draft.keeps_states or len(part[0].pending) > 1:
                yield part

    def _step(self, batch: Sequence[_Continued]) -> None:
        """Compute all pending tokens; the last result of each sequence is a guess."""
        counts = [len(sequence.pending) for sequence in batch]
        with append_all([sequence.text.cache for sequence in batch], counts) as placed:
            inputs, blocks, copies = _inputs(batch, placed, counts), placed.blocks, placed.copies
            step = Step(inputs, "tokens", blocks, copies, states=placed.states, few=True)
            tokens = self._draft.run_step(step)
        for sequence, token in zip(batch, tokens.tolist(), strict=True):
            sequence.add([token])

    def _steps(self, batch: Sequence[_Continued], steps: int) -> None:
        """Compute a number of guesses of each sequence, in one launch."""
        if steps == 1:
            self._step(batch)
            return
        with append_all(
            [sequence.text.cache for sequence in batch], [steps] * len(batch)
        ) as placed:
            inputs = _inputs(batch, placed, [steps] * len(batch))
            del inputs["slots"]
            inputs["lengths"] = placed.lengths - (steps - 1)
            inputs["ended"] = torch.zeros(len(batch), dtype=torch.bool)
            blocks, copies = placed.blocks, placed.copies
            step = Step(inputs, "tokens", blocks, copies, steps, states=placed.states)
            tokens = self._draft.run_steps(step)
        for sequence, new in zip(batch, tokens.T.tolist(), strict=True):
            sequence.add(new)


def _inputs(
    batch: Sequence[_Continued], placed: Appended, new: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Return the inputs of pending tokens, after which there is room for `new` ones."""
    starts = [0, *accumulate(len(sequence.pending) for sequence in batch)]
    before = (placed.lengths - torch.tensor(new)).tolist()
    inputs = {
        "input_ids": [token for sequence in batch for token in sequence.pending],
        "positions": [
            place
            for first, sequence in zip(before, batch, strict=True)
            for place in range(first, first + len(sequence.pending))
        ],
        "starts": starts,
        "logit_rows": [end - 1 for end in starts[1:]],
    }
    return {name: torch.tensor(value) for name, value in inputs.items()} | placed.inputs()
