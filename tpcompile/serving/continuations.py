"""The continuations of requests: their tokens, where they end, and what their callers receive."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from tpcompile.serving.params import SamplingParams
from tpcompile.serving.plan import Piece, Sequence
from tpcompile.serving.requests import ABORT, LENGTH, STOP, Event, Handle
from tpcompile.serving.sampling import Chosen, Sampler, described
from tpcompile.serving.scheduler import Scheduler
from tpcompile.serving.words import Words


@dataclass
class _Continuation:
    """A continuation of a request."""

    handle: Handle
    index: int
    sampler: Sampler
    words: Words | None
    most: int
    """The number of tokens of the prompt and the continuation."""
    forked: bool = False
    """Whether the other continuations of the request have begun."""


class Continuations:
    """All continuations that run or wait, by their sequences."""

    def __init__(self, scheduler: Scheduler, tokenizer: Any, ends: frozenset[int]) -> None:
        """Hold no continuations yet. `ends` are the tokens that end a sequence of the model."""
        self._scheduler, self._tokenizer, self._ends = scheduler, tokenizer, ends
        self._all: dict[Sequence, _Continuation] = {}

    def __bool__(self) -> bool:
        return bool(self._all)

    def params(self, piece: Piece) -> SamplingParams:
        """Return the options of the request that a piece belongs to."""
        return self._all[piece.sequence].handle.params

    def begin(self, handle: Handle, most: int, salt: Hashable) -> None:
        """Add the first continuation of a request; the others follow after the prompt."""
        whole = handle.params.prompt_logprobs is not None
        sequence = self._scheduler.add(handle.prompt, salt, whole)
        self._all[sequence] = self._made(handle, 0, most)

    def describe_prompt(self, piece: Piece, logits: torch.Tensor) -> None:
        """Record the log-probabilities of the tokens that follow those of a piece of a prompt.

        A prompt that is computed again is not recorded again.
        """
        handle = self._all[piece.sequence].handle
        done = len(handle.prompt_chosen)
        for place, row in enumerate(logits, piece.first + 1):
            if done < place < len(handle.prompt):
                most = handle.params.prompt_logprobs
                handle.prompt_chosen.append(described(handle.prompt[place], row, most))

    def go_on(self, sequence: Sequence, found: torch.Tensor | Chosen) -> None:
        """Append the token that logits give, or that was chosen; begin others after a prompt."""
        own = self._all[sequence]
        if not own.forked and own.index == 0:
            own.forked = True
            own.handle.shared = sequence.shared
            for index in range(1, own.handle.params.n):
                child = self._scheduler.fork(sequence)
                self._all[child] = self._made(own.handle, index, own.most)
                if child.left == 0:
                    self._append(child, found)
        self._append(sequence, found)

    def abort(self, handle: Handle) -> None:
        """End all continuations of a request, also those that have not begun."""
        for sequence, own in list(self._all.items()):
            if own.handle is not handle:
                continue
            self._end(sequence, Event(own.index, None, finish=ABORT))
            if not own.forked and own.index == 0:
                for index in range(1, handle.params.n):
                    handle.put(Event(index, None, finish=ABORT))

    def fail(self, error: BaseException) -> None:
        """End all requests with an error."""
        handles = {id(own.handle): own.handle for own in self._all.values()}
        for sequence in self._all:
            self._scheduler.end(sequence)
        self._all.clear()
        for handle in handles.values():
            handle.put(error)

    def _append(self, sequence: Sequence, found: torch.Tensor | Chosen) -> None:
        own = self._all[sequence]
        chosen = found
        if not isinstance(chosen, Chosen):
            chosen = own.sampler.choose(chosen, sequence.tokens)
        self._scheduler.append(sequence, chosen.token)
        params = own.handle.params
        new = len(sequence.tokens) - len(own.handle.prompt)
        finish = None
        if new > params.min_tokens and chosen.token in self._ends_of(params):
            finish = STOP
        elif len(sequence.tokens) >= own.most:
            finish = LENGTH
        text = "" if own.words is None or finish == STOP else own.words.push(chosen.token)
        if own.words is not None and own.words.stopped:
            finish = STOP
        if finish is None:
            own.handle.put(Event(own.index, chosen, text))
            return
        text += "" if own.words is None else own.words.end()
        self._end(sequence, Event(own.index, chosen, text, finish))

    def _end(self, sequence: Sequence, event: Event) -> None:
        self._scheduler.end(sequence)
        self._all.pop(sequence).handle.put(event)

    def _made(self, handle: Handle, index: int, most: int) -> _Continuation:
        params = handle.params
        sampler = Sampler(params, len(handle.prompt), index, self._ends_of(params))
        words = None if self._tokenizer is None else Words(self._tokenizer, params.stop)
        return _Continuation(handle, index, sampler, words, most)

    def _ends_of(self, params: SamplingParams) -> frozenset[int]:
        own = frozenset(params.stop_tokens)
        return own if params.ignore_eos else own | self._ends


def end_tokens(config: Any) -> frozenset[int]:
    """Return the tokens that end a sequence, by a generation configuration."""
    found = config.eos_token_id
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)
