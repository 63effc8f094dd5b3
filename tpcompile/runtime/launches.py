"""Launches of several decode steps for greedy generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from tpcompile.backends.executor import OnTokens
from tpcompile.errors import RankError, UnsupportedError
from tpcompile.inspect.step_trace import StepTrace
from tpcompile.runtime.cache_name import CACHE
from tpcompile.runtime.kv.blocks import BlockPool
from tpcompile.runtime.kv.cache import PagedCache
from tpcompile.runtime.kv.packing import pack
from tpcompile.runtime.leading import Leading
from tpcompile.runtime.ranks.program import ProgramRanks
from tpcompile.runtime.ranks.step import Step


@dataclass(frozen=True)
class Reserved:
    """Blocks of a KV cache, and states of linear attention, that only their holder uses."""

    numbers: tuple[int, ...]
    pool: BlockPool
    states: tuple[int, ...] = ()
    """The numbers of the states; none without linear attention."""

    @property
    def size(self) -> int:
        """The tokens in a block."""
        return self.pool.block

    @property
    def in_all(self) -> int:
        """The blocks that the ranks must have."""
        return self.pool.blocks

    @property
    def states_in_all(self) -> int:
        """The states that the ranks must have."""
        return self.pool.states.blocks if self.pool.states is not None else 0

    def release(self) -> None:
        """Free the blocks and the states."""
        self.pool.free(self.numbers)
        if self.pool.states is not None:
            self.pool.states.free(self.states)


class Launches(Leading):
    """Mixin of a compiled model that runs several decode steps in one call of the ranks."""

    _pool: BlockPool | None
    made_by: Callable[..., Any] | None = None
    """Compiles the model again; None under a launcher."""
    batches: Callable[..., Any] | None = None
    """Runs `generate_batch`; None for simulated stages."""

    def steps_ahead(
        self, inputs: Mapping[str, Any], stops: tuple[int, ...] | None, remaining: int
    ) -> int:
        """Return the number of steps that the next launch may run, at least 1.

        `inputs` are the arguments of `forward` for the first step. `stops` are the tokens that end
        a sequence, or None if Python code inspects each token. A launch reserves columns of the
        cache for all its steps, and does not release them if all sequences end early. So it needs
        a temporary cache.
        """
        cache: PagedCache = inputs[CACHE]
        if stops is None or not cache.temporary:
            return 1
        positions = inputs.get("position_ids")
        last = 0 if positions is None else int(positions.max())
        room = min(cache.room, cache.get_max_length() - last)
        return max(1, min(self.most_steps(len(stops)), room, remaining))

    def most_steps(self, stops: int = 0) -> int:
        """Return the maximum steps per launch, given the number of tokens that end a sequence."""
        return self._ranks.most_steps(stops) if isinstance(self._ranks, ProgramRanks) else 1

    def launch(
        self,
        inputs: Mapping[str, Any],
        ended: torch.Tensor,
        steps: int,
        stops: tuple[int, ...],
        on_tokens: OnTokens | None = None,
    ) -> torch.Tensor:
        """Run `steps` greedy steps, fewer if all sequences end; return tokens, `[steps, batch]`.

        `inputs` are the arguments of `forward` for the first step. A sequence that has ended gets
        -1. `on_tokens` receives the tokens of each step as soon as they are known.
        """
        cache: PagedCache = inputs[CACHE]
        mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
        ids = inputs["input_ids"].cpu()
        packed = pack(
            ids,
            None if mask is None else mask.bool().cpu(),
            None if positions is None else positions.cpu(),
            [ids.shape[1] - 1],
            cache.real,
        )
        new = torch.ones(len(ended), steps, dtype=torch.bool)
        with cache.append(new) as placed:
            tensors = packed.inputs() | placed.inputs()
            del tensors["slots"]
            tensors |= {"lengths": placed.lengths - (steps - 1), "ended": ended.cpu()}
            step = Step(
                tensors, "tokens", placed.blocks, placed.copies, steps, stops, states=placed.states
            )
            return self.run_steps(step, on_tokens)

    def run_steps(self, step: Step, on_tokens: OnTokens | None = None) -> torch.Tensor:
        """Run `step.steps` greedy steps by a program; return their tokens, `[steps, sequences]`."""
        assert isinstance(self._ranks, ProgramRanks)
        with self._open_calls.enter():
            return self._ranks.launch(step, on_tokens)

    def generate_batch(self, inputs: Any, *arguments: Any, **options: Any) -> Any:
        """Continue prompts of any lengths by continuous batching: Hugging Face's `generate_batch`.

        `inputs` are lists of token ids, and `options` fields of a generation configuration. Under
        a launcher, call it in every process; all of them get the result.
        """
        if self.batches is None:
            raise UnsupportedError("generate_batch needs a compiled model", got="a simulated stage")
        if not self.leads:
            outputs, error = self.follow() or self.follow()  # the first one until the engine ends
        else:
            outputs, error = self._batches(inputs, *arguments, **options)
            self.release_followers((outputs, error))
        if error is not None:
            raise error
        return outputs

    def _batches(self, *arguments: Any, **options: Any) -> tuple[Any, Exception | None]:
        """Run `batches`; return its result, or the error that other processes raise too."""
        assert self.batches is not None
        try:
            return self.batches(self, *arguments, **options), None
        except RankError:
            raise
        except Exception as error:
            return None, error

    @property
    def block_size(self) -> int:
        """The tokens in a block of the KV cache."""
        return self._cache_pool.block

    @property
    def keeps_states(self) -> bool:
        """Whether sequences have states of linear attention besides K and V."""
        return self._cache_pool.states is not None

    @property
    def closed(self) -> str:
        """The reason why the model cannot run; empty while it can."""
        return self._ranks.closed

    @property
    def _cache_pool(self) -> BlockPool:
        if self._pool is None:
            raise UnsupportedError(
                "The model was compiled without a KV cache",
                expected="a pipeline that ends in cache-kv",
                hint="Pass the whole sequence in each call, with use_cache=False",
            )
        return self._pool

    def reserve(self, blocks: int, states: int = 0) -> Reserved:
        """Take blocks of the KV cache for steps that `run_step` runs, until they are released.

        With linear attention, also take `states`, at least one. The ranks allocate all of them now:
        a step computes a token without logits in the first block.
        """
        pool = self._cache_pool
        sizes = pool.sizes
        state_slots = pool.states.take(states, exactly=True) if pool.states is not None else ()
        reserved = Reserved(pool.take(blocks), pool, state_slots)
        first = reserved.numbers[0]
        inputs = {
            "input_ids": [0],
            "positions": [0],
            "starts": [0, 1],
            "logit_rows": [],
            "slots": [first * pool.block],
            "lengths": [1],
            "tables": [[first]],
            **({"read": state_slots[:1], "write": state_slots[:1]} if state_slots else {}),
        }
        tensors = {name: torch.tensor(value, dtype=torch.long) for name, value in inputs.items()}
        try:
            self.run_step(Step(tensors, "logits", reserved.in_all, states=reserved.states_in_all))
        except BaseException:
            reserved.release()
            pool.shrink_to(sizes)
            raise
        return reserved

    def time_steps(self, timed: bool = True) -> None:
        """Record the times of instructions in steps that a program runs from now on."""
        self._timing_ranks().timed = timed

    def trace(self) -> StepTrace:
        """Return the last timed step beside its simulation.

        `write(file)` writes both as a Perfetto trace, with begin, wait and end of each instruction;
        `table()` sums the times by kind of instruction. Under a launcher, call it in every process.
        """
        return self._timing_ranks().trace()

    def _timing_ranks(self) -> ProgramRanks:
        ranks = self._ranks
        if not isinstance(ranks, ProgramRanks) or not ranks.can_time:
            raise UnsupportedError(
                "Only programs in compiled code record the times of instructions",
                hint='Compile the model with backend="native" or backend="triton"',
            )
        return ranks


def stop_tokens(criteria: Any) -> tuple[int, ...] | None:
    """Return the tokens that end a sequence, or None if Python code decides after each token."""
    known = (MaxLengthCriteria, EosTokenCriteria)
    if any(type(criterion) not in known for criterion in criteria):
        return None
    ends = [
        criterion.eos_token_id.tolist()
        for criterion in criteria
        if isinstance(criterion, EosTokenCriteria)
    ]
    return tuple(dict.fromkeys(token for tokens in ends for token in tokens))
