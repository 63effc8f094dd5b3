"""The engine: many requests on one model, in steps that mix new tokens and chunks of prompts."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable
from collections.abc import Sequence as Many
from math import lcm
from typing import Any

import torch

from tpcompile.closing import Closing
from tpcompile.errors import EndedError, RankError, UnsupportedError, UsageError
from tpcompile.ir.ops.delta import CHUNK as DELTA_CHUNK
from tpcompile.runtime.kv.blocks import blocks_for
from tpcompile.runtime.model import CompiledModel
from tpcompile.runtime.ranks.step import MOST_ROWS
from tpcompile.runtime.text import encode_prompt
from tpcompile.serving.continuations import Continuations, end_tokens
from tpcompile.serving.defaults import sampling_defaults
from tpcompile.serving.grammars import Grammar, Grammars
from tpcompile.serving.loop import Loop
from tpcompile.serving.memory import room_for
from tpcompile.serving.params import SamplingParams
from tpcompile.serving.plan import Limits
from tpcompile.serving.requests import Handle
from tpcompile.serving.runs import Runs
from tpcompile.serving.scheduler import Scheduler
from tpcompile.serving.speculation import Drafter, speculation_of

log = logging.getLogger(__name__)

SEQUENCES = 16
"""The requests that run at the same time by default."""
_PROMPT_TOKENS = 1024
"""The tokens of prompts in a step by default: with fewer, more steps have few new tokens."""
_CHUNK = 128
_MOST_LOST = 3
"""The maximum number of retries of a step with new ranks."""


class Engine(Closing):
    """Continuous batching: requests join and leave while others run.

    Each step computes the next token of every running request, and chunks of the prompts of new
    ones. Requests with the same first tokens share the blocks of whole chunks. `params` decide how
    a request is continued; the result does not depend on other requests.

    If a rank dies, the model is compiled again, and requests continue with the same results.

    Without a thread, waiting for a result runs the steps. `start` runs them in a thread, and so
    does `async for`.
    """

    def __init__(
        self,
        model: CompiledModel,
        *,
        tokenizer: Any | None = None,
        max_batch: int | None = None,
        max_tokens_per_step: int | None = None,
        kv_tokens: int | None = None,
        snapshots: int | None = None,
        chunk: int = _CHUNK,
        speculate: str | CompiledModel | Drafter | None = None,
    ) -> None:
        """Allocate the KV cache, and the states of linear attention if the model has it.

        `max_batch` is the number of requests that run at the same time (default: the model's limit,
        else 16), `max_tokens_per_step` the tokens that a step computes (default: 1,024 of prompts
        besides one of each request), and `kv_tokens` the tokens of all requests together (default:
        the longest sequence for each of them, or as many as fit in half of the free memory).
        With linear attention, requests share a prefix where there is a snapshot of the state;
        `snapshots` is their number (default: two for each request, or as many as fit). `tokenizer`
        decodes tokens, and encodes prompts that are text.

        `speculate` guesses tokens; the results stay the same. `"prompt:8"` guesses up to 8 from
        the text so far, a smaller compiled model guesses its own, and a `Drafter` is custom code.
        """
        if not model.leads:
            raise UsageError(
                "Only the first process under a launcher may have an engine",
                hint="Call model.follow() in the others, which runs the steps of the engine",
            )
        self.model, self.tokenizer = model, tokenizer
        sequences = max_batch or model.max_batch or SEQUENCES
        self._speculation = speculation_of(speculate, model)
        guesses = MOST_ROWS if self._speculation is not None else 0
        tokens, states = room_for(model, sequences, kv_tokens, snapshots, guesses)
        size = model.block_size
        count, unit = blocks_for(tokens, size), lcm(size, DELTA_CHUNK) if states else size
        whole = blocks_for(max(chunk, model.most_program_tokens + 1), unit) * unit
        most = max_tokens_per_step or sequences + max(_PROMPT_TOKENS, whole)
        limits = Limits(count, size, sequences, most, whole, states)
        self.scheduler = Scheduler(limits)
        self.defaults = sampling_defaults(model.generation_config)
        """The options of `SamplingParams` that the model's generation configuration sets."""
        self.steps = 0
        """The number of steps so far."""
        self.restarts = 0
        """The number of times that the model was compiled again."""
        self._lost = 0
        """The steps that failed since the last good one."""
        ends = end_tokens(model.generation_config)
        words = model.config.vocab_size
        self._grammars = None if tokenizer is None else Grammars(tokenizer, words, ends)
        self._work = Continuations(self.scheduler, tokenizer, ends)
        self._runs = self._runs_of(model)
        self._loop = Loop(self.step, lambda: bool(self._work), self._beat)

    def add(
        self,
        prompt: str | Many[int] | torch.Tensor,
        params: SamplingParams | None = None,
        *,
        salt: Hashable = None,
    ) -> Handle:
        """Add a request. It shares blocks only with requests of the same `salt`.

        Without `params`, the generation configuration of the model says how to continue it.
        An error that a request causes later ends this request alone: its handle raises it.
        """
        params = SamplingParams(**self.defaults) if params is None else params
        params.check_vocabulary(self.model.config.vocab_size)
        try:
            hash(salt)
        except TypeError as error:
            raise UsageError("salt must be hashable", got=repr(salt)) from error
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
        grammar = self.grammar(params)
        handle = Handle(tokens, params, self._loop.drive, self.start, self.abort)
        most = room if params.max_tokens is None else min(room, len(tokens) + params.max_tokens)
        self._loop.command(lambda: self._work.begin(handle, most, salt, grammar))
        return handle

    def grammar(self, params: SamplingParams) -> Grammar | None:
        """Return the compiled structure of a request, if it has one; it is compiled only once.

        `add` does this in the thread of its caller. A server may do it earlier in another thread.
        """
        if params.structure is None:
            return None
        if self._grammars is None:
            raise UsageError("A structure needs an engine with a tokenizer")
        return self._grammars.grammar(params.structure)

    def abort(self, handle: Handle, index: int | None = None) -> None:
        """End a request, or one of its continuations that has a token.

        Its blocks are free after the current step.
        """
        self._loop.command(lambda: self._work.abort(handle, index))

    def end_requests(self, reason: str) -> None:
        """End all requests with an error, after the current step."""
        if not self.failure:  # else they have ended
            self._loop.command(lambda: self._work.fail(EndedError(reason)))

    @property
    def failure(self) -> str:
        """The reason for which the engine cannot go on; empty while it can."""
        return self._loop.failure

    def step(self) -> bool:
        """Run a step; return whether there is more work. Call it only without a thread."""
        self._loop.run_commands()
        try:
            return self._run_plan()
        except RankError as error:
            self._recover(error)
            return True
        except BaseException as error:
            self._work.fail(error)
            raise
        finally:
            self._work.end_failed()

    def _run_plan(self) -> bool:
        speculation = self._speculation
        if speculation is not None:
            speculation.guess(
                {sequence: self._work.room(sequence) for sequence in self.scheduler.decoding}
            )
        plan = self.scheduler.plan()
        if not plan:
            return False
        begun = time.perf_counter()
        for pieces, outcomes in self._runs.run(plan):
            if speculation is not None and pieces is plan.decodes:
                speculation.timed(pieces, time.perf_counter() - begun)
            self.scheduler.done(pieces)
            for piece, results in outcomes:
                accepted = self._work.go_on(piece, results)
                if speculation is not None and pieces is plan.decodes:
                    speculation.learn(piece, accepted)
            begun = time.perf_counter()
        self.steps += 1
        self._lost = 0
        return True

    def restart(self, **changes: Any) -> None:
        """Compile the model again before the next step, for example with another `tp`.

        Running requests continue afterwards: their tokens are computed again, as prompts.
        """
        self._loop.command(lambda: self._restart(changes))

    def _recover(self, error: RankError) -> None:
        """Start the ranks again after one has died, or end all requests if that fails."""
        self._lost += 1
        log.warning("a step failed: %s", error)
        if self.model.made_by is None or self._lost > _MOST_LOST:
            self._give_up(error)
            raise error
        self._restart({})

    def _restart(self, changes: dict[str, Any]) -> None:
        """Replace the model by a new one, and restart all requests with their tokens."""
        try:
            if self.model.made_by is None:
                raise UnsupportedError("The model cannot be compiled again under a launcher")
            self.model.close()
            self.restarts += 1
            log.warning("the ranks are started again (%d)", self.restarts)
            begun = time.perf_counter()
            self.model = self.model.made_by(**changes)
            self.scheduler.restart()
            if self._speculation is not None:
                self._speculation.counts = self.model.guesses
            self._runs = self._runs_of(self.model)
            log.warning("the ranks run again after %.1f s", time.perf_counter() - begun)
        except BaseException as error:
            self._give_up(error)
            raise

    def _runs_of(self, model: CompiledModel) -> Runs:
        limits = self.scheduler.limits
        reserved = model.reserve(limits.blocks, limits.states)
        return Runs(model, reserved, self._work.params, self._work.describe_prompt)

    def _give_up(self, error: BaseException) -> None:
        """End all requests, because no model can run."""
        self._loop.failure = str(error)
        log.error("the engine cannot go on: %s", error)
        self._work.fail(error)

    def state(self) -> str:
        """Describe running and waiting requests in one line."""
        scheduler, blocks, states = self.scheduler, self.scheduler.blocks, self.scheduler.states
        snapshots = f"{states.kept:,} snapshots, " if states.count else ""
        return (
            f"{len(scheduler.running)} running, {len(scheduler.waiting)} waiting, "
            f"{blocks.held:,} of {blocks.count:,} blocks, {snapshots}{self.steps:,} steps"
        )

    def start(self) -> Engine:
        """Run steps in a thread whenever there is work."""
        self._loop.start()
        return self

    def close(self) -> None:
        """End all requests, and release the blocks and the states.

        The model stays open, except if the engine has compiled it again.
        """
        if not self._loop.close():
            return
        self._work.fail(UsageError("The engine is closed"))
        self._runs.release()
        if self._grammars is not None:
            self._grammars.close()
        self.model.release_followers()
        if self.restarts:
            self.model.close()

    def _beat(self) -> None:
        """Detect a dead process while there is no work."""
        try:
            self.model.keep_followers()
        except RankError as error:
            self._give_up(error)
            raise

    def _tokens(self, prompt: str | Many[int] | torch.Tensor) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise UsageError("A prompt as text needs an engine with a tokenizer")
            tokens = encode_prompt(self.tokenizer, prompt)
        else:
            tokens = prompt.flatten().tolist() if isinstance(prompt, torch.Tensor) else list(prompt)
        most = self.model.config.vocab_size
        if not tokens or not all(isinstance(token, int) and 0 <= token < most for token in tokens):
            raise UsageError(
                "A prompt must be tokens of the model, at least one",
                got=f"{tokens[:8]}{'…' if len(tokens) > 8 else ''}",
                expected=f"integers from 0 to {most - 1}",
            )
        return [int(token) for token in tokens]
