"""The engine: many requests on one model, in steps that mix new tokens and chunks of prompts."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Many
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from tpcompile.errors import UnsupportedError, UsageError
from tpcompile.runtime.model import CompiledModel
from tpcompile.serving.memory import tokens_that_fit
from tpcompile.serving.params import SamplingParams
from tpcompile.serving.requests import ABORT, LENGTH, STOP, Event, Handle
from tpcompile.serving.sampling import Chosen, Sampler, described
from tpcompile.serving.scheduler import Limits, Plan, Scheduler, Sequence
from tpcompile.serving.steps import step_of
from tpcompile.serving.words import Words

_SEQUENCES = 16
_STEP_TOKENS = 512
_CHUNK = 128


@dataclass
class _Continuation:
    """A continuation of a request."""

    handle: Handle
    index: int
    sampler: Sampler
    words: Words | None
    prompt: int
    """The number of tokens of the prompt."""
    most: int
    """The number of tokens of the prompt and the continuation."""
    forked: bool = False
    """Whether the other continuations of the request have begun."""


class Engine:
    """Continuous batching: requests come and go while others run.

    Each step computes the next token of every running request, and chunks of the prompts of new
    ones. Requests with the same first tokens share the blocks of whole chunks. `params` decide how
    a request is continued; the result does not depend on what else is running.

    Without a thread, waiting for a result runs the steps. `start` runs them in a thread, which
    `async for` needs.
    """

    def __init__(
        self,
        model: CompiledModel,
        *,
        tokenizer: Any | None = None,
        max_batch: int | None = None,
        max_tokens_per_step: int = _STEP_TOKENS,
        kv_tokens: int | None = None,
        chunk: int = _CHUNK,
    ) -> None:
        """Reserve the KV cache.

        `max_batch` is the number of requests that run at the same time (default: the model's limit,
        else 16), and `kv_tokens` the tokens of all of them together (default: the longest sequence
        for each of them, or as many as fit in half of the free memory). `tokenizer` makes text of
        tokens, and tokens of prompts that are text.
        """
        if len(set(model.processes)) > 1 and model.fronts > 1:
            raise UnsupportedError(
                "An engine must be the only caller of its model",
                got="a model under a launcher",
                hint="Compile it in a plain script, which starts the other ranks itself",
            )
        self.model, self.tokenizer = model, tokenizer
        sequences = max_batch or model.max_batch or _SEQUENCES
        tokens = kv_tokens or min(sequences * model.max_seq_len, tokens_that_fit(model))
        with ExitStack() as stack:
            size = model.block_size
            count = -(-tokens // size)
            limits = Limits(count, size, sequences, max_tokens_per_step, -(-chunk // size) * size)
            self.scheduler = Scheduler(limits)
            self._reserved = stack.enter_context(model.reserve(count))
            self._stack = stack.pop_all()
        self.steps = 0
        """The number of steps so far."""
        self._ends = _end_tokens(model)
        self._work: dict[Sequence, _Continuation] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._turn = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.failure = ""
        """Why the engine cannot go on; empty while it can."""

    def add(
        self,
        prompt: str | Many[int] | torch.Tensor,
        params: SamplingParams | None = None,
        *,
        salt: Hashable = None,
    ) -> Handle:
        """Add a request. It shares blocks only with requests of the same `salt`."""
        params = params or SamplingParams()
        tokens = self._tokens(prompt)
        room = min(self.model.max_seq_len, self.scheduler.limits.most_tokens)
        if len(tokens) >= room:
            raise UsageError(
                "A prompt must leave room for a new token",
                got=f"{len(tokens):,} tokens",
                expected=f"at most {room - 1:,} tokens",
                hint="Compile with a larger max_seq_len, or give the engine more kv_tokens",
            )
        if params.stop and self.tokenizer is None:
            raise UsageError("Stop texts need an engine with a tokenizer", got=str(params.stop))
        handle = Handle(tokens, params, self._drive, self.abort)
        most = room if params.max_tokens is None else min(room, len(tokens) + params.max_tokens)

        def begin() -> None:
            whole = params.prompt_logprobs is not None
            sequence = self.scheduler.add(tokens, salt, whole)
            self._work[sequence] = self._continuation(handle, 0, most)

        self._command(begin)
        return handle

    def abort(self, handle: Handle) -> None:
        """End a request. Its blocks are free after the current step."""

        def end() -> None:
            for sequence, own in list(self._work.items()):
                if own.handle is handle:
                    self._end(sequence, Event(own.index, None, finish=ABORT))
                    if not own.forked and own.index == 0:
                        for index in range(1, handle.params.n):
                            handle.put(Event(index, None, finish=ABORT))

        self._command(end)

    def step(self) -> bool:
        """Run a step; return whether there is more to do. Call it only without a thread."""
        while self._commands:
            self._commands.popleft()()
        plan = self.scheduler.plan()
        if not plan:
            return False
        try:
            found = self._run(plan)
        except BaseException as error:
            self.failure = self.model.closed
            self._fail(error)
            raise
        self.steps += 1
        self.scheduler.done(plan)
        for sequence, logits in found:
            self._go_on(sequence, logits)
        return True

    def state(self) -> str:
        """Describe in a line what runs and what waits."""
        scheduler = self.scheduler
        used = scheduler.blocks.count - scheduler.blocks.available
        return (
            f"{len(scheduler.running)} running, {len(scheduler.waiting)} waiting, "
            f"{used:,} of {scheduler.blocks.count:,} blocks, {self.steps:,} steps"
        )

    def start(self) -> Engine:
        """Run steps in a thread whenever there is something to do."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
            self._thread.start()
        return self

    def close(self) -> None:
        """End all requests, and release the blocks. The model stays open."""
        with self._turn:
            if self._closed:
                return
            self._closed = True
            self._turn.notify_all()
        if self._thread is not None:
            self._thread.join()
        while self._commands:
            self._commands.popleft()()
        self._fail(UsageError("The engine is closed"))
        self._stack.close()

    def _loop(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._closed or self._commands or self._work)
                if self._closed:
                    return
            try:
                self.step()
            except Exception:  # the requests have it already
                continue

    def _drive(self) -> bool:
        """Run a step for somebody who waits; return False if a thread does."""
        if self._closed:
            raise UsageError("The engine is closed")
        if self._thread is not None:
            return False
        return self.step()

    def _command(self, command: Callable[[], None]) -> None:
        """Run a command before the next step."""
        with self._turn:
            if self._closed:
                raise UsageError("The engine is closed")
            self._commands.append(command)
            self._turn.notify_all()

    def _run(self, plan: Plan) -> list[tuple[Sequence, Any]]:
        """Run the model; return the sequences that go on with their logits, or with tokens."""
        found: list[tuple[Sequence, Any]] = []
        copies = plan.copies
        if plan.decodes:
            greedy = all(self._work[p.sequence].handle.params.plain for p in plan.decodes)
            step = step_of(plan.decodes, "tokens" if greedy else "logits", self._reserved, copies)
            rows = self.model.run_step(step).cpu()
            results = [Chosen(token) for token in rows.tolist()] if greedy else rows
            found += zip((p.sequence for p in plan.decodes), results, strict=True)
            copies = []
        for piece in plan.chunks:
            handle = self._work[piece.sequence].handle
            every = handle.params.prompt_logprobs is not None
            step = step_of([piece], "logits", self._reserved, copies, every)
            rows = self.model.run_step(step).cpu()
            copies = []
            if every:
                _describe_prompt(handle, piece.first, rows)
            if piece.last:
                found.append((piece.sequence, rows[-1]))
        return found

    def _go_on(self, sequence: Sequence, logits: Any) -> None:
        """Append a token to a sequence, and begin the other continuations after a prompt."""
        own = self._work[sequence]
        if not own.forked and own.index == 0:
            own.forked = True
            own.handle.shared = sequence.shared
            for index in range(1, own.handle.params.n):
                child = self.scheduler.fork(sequence)
                self._work[child] = self._continuation(own.handle, index, own.most)
                if child.left == 0:
                    self._append(child, logits)
        self._append(sequence, logits)

    def _append(self, sequence: Sequence, logits: Any) -> None:
        own = self._work[sequence]
        chosen = logits
        if not isinstance(logits, Chosen):
            chosen = own.sampler.choose(logits, sequence.tokens)
        self.scheduler.append(sequence, chosen.token)
        new, params = len(sequence.tokens) - own.prompt, own.handle.params
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
        self.scheduler.end(sequence)
        self._work.pop(sequence).handle.put(event)

    def _fail(self, error: BaseException) -> None:
        """End all requests with an error."""
        handles = {id(own.handle): own.handle for own in self._work.values()}
        for sequence in list(self._work):
            self.scheduler.end(sequence)
        self._work.clear()
        for handle in handles.values():
            handle.put(error)

    def _continuation(self, handle: Handle, index: int, most: int) -> _Continuation:
        params, prompt = handle.params, len(handle.prompt)
        sampler = Sampler(params, prompt, index, self._ends_of(params))
        words = None if self.tokenizer is None else Words(self.tokenizer, params.stop)
        return _Continuation(handle, index, sampler, words, prompt, most)

    def _ends_of(self, params: SamplingParams) -> frozenset[int]:
        own = frozenset(params.stop_tokens)
        return own if params.ignore_eos else own | self._ends

    def _tokens(self, prompt: str | Many[int] | torch.Tensor) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise UsageError("A prompt as text needs an engine with a tokenizer")
            found = self.tokenizer(prompt, verbose=False)["input_ids"]
        else:
            found = prompt.flatten().tolist() if isinstance(prompt, torch.Tensor) else list(prompt)
        most = self.model.config.vocab_size
        if not found or not all(isinstance(t, int) and 0 <= t < most for t in found):
            raise UsageError(
                "A prompt must be tokens of the model, at least one",
                got=f"{found[:8]}{'…' if len(found) > 8 else ''}",
                expected=f"integers from 0 to {most - 1}",
            )
        return [int(token) for token in found]

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _end_tokens(model: CompiledModel) -> frozenset[int]:
    """Return the tokens that end a sequence, by the generation configuration."""
    found = model.generation_config.eos_token_id
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)


def _describe_prompt(handle: Handle, first: int, logits: torch.Tensor) -> None:
    """Record the log-probabilities of the prompt's tokens after the tokens from `first` on.

    A prompt that is computed again after preemption is not recorded again.
    """
    most, done = handle.params.prompt_logprobs, len(handle.prompt_chosen)
    for place, row in enumerate(logits, first + 1):
        if done < place < len(handle.prompt):
            logprobs = torch.log_softmax(row.float(), 0)
            handle.prompt_chosen.append(described(handle.prompt[place], logprobs, most))
