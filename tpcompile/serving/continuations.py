"""The continuations of requests: their tokens, their ends, and the events of their callers."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tpcompile.errors import CompileError, RankError, RequestError
from tpcompile.serving.ending import closes_from
from tpcompile.serving.grammars import Grammar
from tpcompile.serving.matcher import Matcher
from tpcompile.serving.params import SamplingParams
from tpcompile.serving.plan import Piece, Sequence
from tpcompile.serving.requests import ABORT, LENGTH, STOP, Event, Handle
from tpcompile.serving.sampling import Chosen, Sampler, described
from tpcompile.serving.scheduler import Scheduler
from tpcompile.serving.thinking import Thinking
from tpcompile.serving.words import Words


@dataclass
class _Continuation:
    """A continuation of a request."""

    handle: Handle
    index: int
    sampler: Sampler
    words: Words | None
    ends: frozenset[int]
    """The tokens that end it."""
    most: int
    """The number of tokens of the prompt and the continuation."""
    grammar: Grammar | None
    matcher: Matcher | None
    thinking: Thinking | None
    forked: bool = False
    """Whether the other continuations of the request have begun."""


class Continuations:
    """All continuations that run or wait, by their sequences.

    An error of a continuation ends its request after the step, and no other one.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: Any, ends: frozenset[int]) -> None:
        """Hold no continuations yet. `ends` are the tokens that end a sequence of the model."""
        self._scheduler, self._tokenizer, self._ends = scheduler, tokenizer, ends
        self._all: dict[Sequence, _Continuation] = {}
        self._failed: dict[Handle, BaseException] = {}
        """The requests to end with an error after the step, in which they may have blocks."""

    def __bool__(self) -> bool:
        return bool(self._all)

    def params(self, piece: Piece) -> SamplingParams:
        """Return the options of the request that a piece belongs to."""
        return self._all[piece.sequence].handle.params

    def begin(
        self, handle: Handle, most: int, salt: Hashable, grammar: Grammar | None = None
    ) -> None:
        """Add the first continuation of a request; the others follow after the prompt."""
        whole = handle.params.prompt_logprobs is not None
        with self._isolated(handle):
            continuation = self._continuation(handle, 0, most, grammar)
            self._all[self._scheduler.add(handle.prompt, salt, whole)] = continuation

    def describe_prompt(self, piece: Piece, logits: torch.Tensor) -> None:
        """Record the log-probabilities of the tokens that follow those of a piece of a prompt.

        A prompt that is computed again is not recorded again.
        """
        handle = self._all[piece.sequence].handle
        done, most = len(handle.prompt_chosen), handle.params.prompt_logprobs
        with self._isolated(handle):
            for place, row in enumerate(logits, piece.first + 1):
                if done < place < len(handle.prompt):
                    handle.prompt_chosen.append(described(handle.prompt[place], row, most))

    def room(self, sequence: Sequence) -> int:
        """Return the number of tokens after the next one that the sequence may have."""
        return self._all[sequence].most - len(sequence.tokens) - 1

    def go_on(self, piece: Piece, results: Many[torch.Tensor | Chosen]) -> int:
        """Append the next tokens, given or from logits; fork the continuations after a prompt.

        The first result belongs to the last known token, and each further one to a guess. It counts
        only if all guesses up to it equal the appended tokens. Return the number of accepted
        guesses.
        """
        sequence = piece.sequence
        continuation = self._all[sequence]
        accepted = 0
        if continuation.handle in self._failed:
            return accepted
        with self._isolated(continuation.handle):
            self._go_on(sequence, continuation, results[0])
            for guess, result in zip(piece.guesses, results[1:], strict=True):
                if sequence not in self._all or sequence.tokens[-1] != guess:
                    break
                accepted += 1
                self._append(sequence, result)
            self._scheduler.accept(sequence, accepted)
        continuation.handle.drafted += len(piece.guesses)
        continuation.handle.accepted += accepted
        return accepted

    def _go_on(
        self, sequence: Sequence, continuation: _Continuation, output: torch.Tensor | Chosen
    ) -> None:
        if not continuation.forked and continuation.index == 0:
            continuation.forked = True
            continuation.handle.shared = sequence.shared
            for index in range(1, continuation.handle.params.n):
                sibling = self._continuation(
                    continuation.handle, index, continuation.most, continuation.grammar
                )
                child = self._scheduler.fork(sequence)
                self._all[child] = sibling
                if child.left == 0:
                    self._append(child, output)
        self._append(sequence, output)

    def abort(self, handle: Handle, only: int | None = None) -> None:
        """End all continuations of a request, started or not, or only one."""
        for sequence, continuation in list(self._all.items()):
            if continuation.handle is not handle or only not in (None, continuation.index):
                continue
            self._end(sequence, Event(continuation.index, None, finish=ABORT))
            if not continuation.forked and continuation.index == 0:
                for index in range(1, handle.params.n):
                    handle.put(Event(index, None, finish=ABORT))

    def fail(self, error: BaseException) -> None:
        """End all requests with an error."""
        self.end_failed()
        for handle in dict.fromkeys(continuation.handle for continuation in self._all.values()):
            self._drop(handle, error)

    def end_failed(self) -> None:
        """End the requests that failed in the step, each with its error."""
        while self._failed:
            handle, error = self._failed.popitem()
            if not isinstance(error, CompileError):
                cause, error = (
                    error,
                    RequestError(
                        "The request failed; others go on", got=f"{type(error).__name__}: {error}"
                    ),
                )
                error.__cause__ = cause
            self._drop(handle, error)

    def _drop(self, handle: Handle, error: BaseException) -> None:
        for sequence, continuation in list(self._all.items()):
            if continuation.handle is handle:
                self._scheduler.end(sequence)
                del self._all[sequence]
        handle.put(error)

    @contextmanager
    def _isolated(self, handle: Handle) -> Iterator[None]:
        """Record an error that ends only this request; raise those that end the engine."""
        try:
            yield
        except (RankError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of a tokenizer is not an Exception
            self._failed.setdefault(handle, error)

    def _append(self, sequence: Sequence, output: torch.Tensor | Chosen) -> None:
        continuation = self._all[sequence]
        chosen = self._choose(sequence, continuation, output)
        if chosen is None:
            text = "" if continuation.words is None else continuation.words.end()
            self._end(sequence, Event(continuation.index, None, text, STOP))
            return
        if continuation.thinking is not None:
            continuation.thinking.read(chosen.token)
        self._scheduler.append(sequence, chosen.token)
        params = continuation.handle.params
        new = len(sequence.tokens) - len(continuation.handle.prompt)
        finish, text = None, ""
        if new > params.min_tokens and chosen.token in continuation.ends:
            finish = STOP
        else:
            finish = LENGTH if len(sequence.tokens) >= continuation.most else None
            text = "" if continuation.words is None else continuation.words.push(chosen.token)
            if _completes(continuation, chosen.token) or (
                continuation.words is not None and continuation.words.stopped
            ):
                finish = STOP
        if finish is None:
            if continuation.matcher is not None:
                left = continuation.most - len(sequence.tokens)
                tokens = continuation.most - len(continuation.handle.prompt)
                continuation.matcher.look_ahead(left <= closes_from(tokens))
            continuation.handle.put(Event(continuation.index, chosen, text))
            return
        text += "" if continuation.words is None else continuation.words.end()
        self._end(sequence, Event(continuation.index, chosen, text, finish))

    def _choose(
        self, sequence: Sequence, continuation: _Continuation, output: torch.Tensor | Chosen
    ) -> Chosen | None:
        """Choose the next token; None if the structure is already complete."""
        masks = () if continuation.matcher is None else (continuation.matcher.forbidden(),)
        if continuation.matcher is not None and continuation.matcher.complete:
            return None
        forced = None if continuation.thinking is None else continuation.thinking.forced
        if forced is not None:
            return _forced(forced, output, continuation.handle.params.logprobs)
        if isinstance(output, Chosen):
            return output
        return continuation.sampler.choose(output, sequence.tokens, *masks)

    def _end(self, sequence: Sequence, event: Event) -> None:
        self._scheduler.end(sequence)
        self._all.pop(sequence).handle.put(event)

    def _continuation(
        self, handle: Handle, index: int, most: int, grammar: Grammar | None
    ) -> _Continuation:
        params = handle.params
        tokens = frozenset(params.stop_tokens)
        ends = tokens if params.ignore_eos else tokens | self._ends
        sampler = Sampler(params, len(handle.prompt), index, ends)
        words = None
        if self._tokenizer is not None:
            words = Words(self._tokenizer, params.stop, params.shown_tokens)
        matcher = None
        if grammar is not None:
            matcher = grammar.matcher(ends)
            matcher.look_ahead(False)
        thinking = None if params.thinking is None else Thinking(params.thinking)
        return _Continuation(handle, index, sampler, words, ends, most, grammar, matcher, thinking)


def _completes(continuation: _Continuation, token: int) -> bool:
    """Advance the structure, if there is one; return whether nothing can follow."""
    if continuation.matcher is None:
        return False
    continuation.matcher.accept(token)
    return continuation.matcher.complete


def _forced(token: int, output: torch.Tensor | Chosen, most: int | None) -> Chosen:
    """Return a forced token, described like a chosen one."""
    if most is None or isinstance(output, Chosen):
        return Chosen(token)
    return described(token, output, most)


def end_tokens(config: Any) -> frozenset[int]:
    """Return the tokens that end a sequence, by a generation configuration."""
    ids = config.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
