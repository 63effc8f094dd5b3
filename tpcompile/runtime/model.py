"""The compiled model that users call: a Hugging Face causal LM whose layers run on ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from tpcompile.backends.triton import Triton
from tpcompile.closing import Closing
from tpcompile.errors import UnsupportedError, UsageError
from tpcompile.frontend import Captured
from tpcompile.inspect.plan import PlanReport, plan_report
from tpcompile.ir.info import info_of
from tpcompile.ir.ops.experts import Routed
from tpcompile.ir.pieces import Read
from tpcompile.libraries import library_errors
from tpcompile.passes import Stage
from tpcompile.rewriting.manager import Stages
from tpcompile.runtime.arguments import (
    check_flag,
    check_ids,
    check_lengths,
    check_mask,
    checked,
    refuse_code,
    refuse_options,
)
from tpcompile.runtime.backend import MODULES
from tpcompile.runtime.cache_name import CACHE, given_cache, renamed
from tpcompile.runtime.causal_lm import CausalLM
from tpcompile.runtime.generation import GreedyOutput
from tpcompile.runtime.guessed import run_guessed
from tpcompile.runtime.kv.blocks import BlockPool, blocks_for
from tpcompile.runtime.kv.cache import Guesses, PagedCache
from tpcompile.runtime.kv.packing import Packed, pack, packs_sequences
from tpcompile.runtime.launches import Launches
from tpcompile.runtime.open_calls import OpenCalls
from tpcompile.runtime.programs import StepProgram
from tpcompile.runtime.ranks.in_process import InProcessRanks
from tpcompile.runtime.ranks.owner import check_open
from tpcompile.runtime.ranks.program import ProgramRanks
from tpcompile.runtime.ranks.protocols import Ranks
from tpcompile.runtime.ranks.rank import RankModule, rank_modules
from tpcompile.runtime.ranks.routing import unpacked
from tpcompile.runtime.ranks.step import Routing, Step, StepCounts
from tpcompile.runtime.router_logits import routed_output, routing_of
from tpcompile.runtime.weights_out import WeightsOut

_UNTRACED = ("forward", "generate")
"""The methods that torch.compile must not trace: they run on ranks."""


class CompiledModel(Closing, WeightsOut, Launches, CausalLM, nn.Module):
    """A causal LM on ranks, with the interface of Hugging Face's causal LMs."""

    explorer: Callable[..., None] | None = None
    """The implementation of `explore`; `compile` sets it."""

    def __new__(cls, captured: Captured, *args: Any, **kwargs: Any) -> CompiledModel:
        """Create an instance of a class with the captured class's name, which pipelines check."""
        why = "A compiled model runs on ranks, which torch.compile cannot trace"
        untraced: Any = torch.compiler.disable
        methods = {name: untraced(getattr(cls, name), reason=why) for name in _UNTRACED}
        named = type(_class_name(captured), (cls,), {"__module__": cls.__module__, **methods})
        model: CompiledModel = super().__new__(named)
        return model

    def __init__(
        self,
        captured: Captured,
        graph: fx.GraphModule,
        stages: Sequence[Stage],
        ranks: Ranks,
        *,
        generation_config: GenerationConfig | None = None,
        max_seq_len: int | None = None,
        max_batch: int | None = None,
        device: torch.device | None = None,
        modules: Sequence[RankModule] = (),
    ) -> None:
        """Wrap started ranks; `modules` describe them, by default as `rank_modules(graph)` does."""
        super().__init__()
        self.config = captured.config
        self.generation_config = generation_config or GenerationConfig.from_model_config(
            captured.config
        )
        self.stages = Stages(stages)
        self._graph = (graph,)  # a tuple, since a submodule would add parameters without data
        self._rank_modules = modules or rank_modules(graph)
        self.tp = len(self._rank_modules)
        self.max_seq_len = max_seq_len or captured.config.max_position_embeddings
        self.max_batch = max_batch
        self._packs = captured.packs
        self._ranks = ranks
        self._name_weights(captured, graph)
        self._device = device or torch.device("cpu")
        self._programs = ranks.programs if isinstance(ranks, ProgramRanks) else None
        self._steps = 0
        self.guesses = Guesses()
        """The numbers of guessed tokens so far."""
        cache = self._rank_modules[0].cache
        self._is_stateful = bool(self._rank_modules[0].states)  # earlier states are gone
        states = BlockPool(1) if self._is_stateful else None
        self._pool = BlockPool(cache.block, self._enough(cache.block), states) if cache else None
        self._open_calls = OpenCalls()
        weakref.finalize(self, self._open_calls.end)  # also runs at exit, before the ranks end
        self.eval()

    def _enough(self, block: int) -> int:
        """Return the number of blocks for max_batch sequences of max_seq_len tokens."""
        return (self.max_batch or 1) * blocks_for(self.max_seq_len, block)

    @classmethod
    def simulated(
        cls, captured: Captured, graph: fx.GraphModule, stages: Sequence[Stage], read: Read
    ) -> CompiledModel:
        """Create a model whose ranks all run in this process, one thread per rank."""
        device = torch.device("cpu")
        ranks = InProcessRanks(rank_modules(graph), read, captured.rotary.fresh, device)
        return cls(captured, graph, stages, ranks)

    @property
    def dtype(self) -> torch.dtype:
        return info_of(self.graph).outputs[0].dtype

    @property
    def device(self) -> torch.device:
        """The device of inputs and results."""
        return self._device

    @property
    def processes(self) -> list[int]:
        """The process ids of the ranks; for simulated ranks, the id of this process."""
        return self._ranks.processes

    @property
    def backend(self) -> str:
        """The backend that runs decode steps: "torch", or the name of an executor."""
        return self._ranks.executor if isinstance(self._ranks, ProgramRanks) else MODULES

    @property
    def graph(self) -> fx.GraphModule:
        """The graph after the last pass."""
        return self._graph[0]

    def explore(self, path: str | Path, **options: Any) -> None:
        """Write the compilation as a page for the browser.

        The options are those of the schedule: `target`, `policy`, `workers`, `batch`, `context` and
        `lowering`.
        """
        if self.explorer is None:
            raise UnsupportedError("explore needs a model that tpcompile.compile returned")
        self.explorer(self, path, **options)

    @property
    def finds_tokens(self) -> bool:
        """Whether the ranks can return the best token without gathering all logits."""
        return len(self._rank_modules[0].outputs) > 1

    @property
    def keeps_cache(self) -> bool:
        return self._pool is not None

    @property
    def computes_rows(self) -> bool:
        """Whether a program computes several new tokens of a sequence in a step."""
        return self._programs is not None

    @property
    def most_program_tokens(self) -> int:
        """The maximum new tokens per sequence that an engine's program computes; 0 without one."""
        return self._ranks.most_tokens if isinstance(self._ranks, ProgramRanks) else 0

    @property
    def plan(self) -> PlanReport:
        """The weights on each rank, and the communication between ranks."""
        return plan_report(self.graph)

    @property
    def program(self) -> StepProgram:
        """The program of decode steps: `.text()` prints it, `.schedule` is its schedule."""
        if self._programs is None:
            raise UnsupportedError(
                "This model runs modules and has no program",
                hint='Compile it with backend="native"',
            )
        return self._programs.for_batch(self._programs.batch)

    @property
    def steps(self) -> StepCounts:
        """The number of steps run so far by programs and by modules, and of guessed tokens.

        Programs compute sequences with few new tokens, and guesses; modules compute others. A call
        with both has a step of each.
        """
        ranks = self._ranks
        programs, modules = 0, self._steps
        if isinstance(ranks, ProgramRanks):
            programs, modules = ranks.programs.steps, ranks.module_steps
        return StepCounts(programs, modules, self.guesses.drafted, self.guesses.accepted)

    def source(self, rank: int = 0) -> str:
        """Return the generated Python module of a rank, and the Triton kernel if it decodes."""
        if not isinstance(rank, int) or not 0 <= rank < self.tp:
            raise UsageError(f"rank must be an integer from 0 to {self.tp - 1}", got=repr(rank))
        source = self._rank_modules[rank].source
        return f"{source}\n\n{self.program.kernel()}" if self.backend == Triton.name else source

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_dict: bool | None = None,
        greedy: bool = False,
        cache: Any = None,
        output_router_logits: bool | None = None,
        **options: Any,
    ) -> Any:
        """Return logits, as Hugging Face's causal LMs do.

        The KV cache has two names: `past_key_values`, and `cache` as in newer versions of
        transformers. `greedy` returns the best token after each sequence instead: the ranks then
        exchange one value and one id per sequence, and no logits. `output_router_logits` also
        returns the router logits of a mixture of experts and their loss; modules run such a step.
        """
        with self._open_calls.enter():
            self._check_open()
            refuse_options(options)
            use_cache = check_flag("use_cache", use_cache)
            return_dict = check_flag("return_dict", return_dict)
            with_routing = check_flag("output_router_logits", output_router_logits)
            routing = routing_of(with_routing, self._rank_modules[0].routers, greedy=greedy)
            keep = 1 if greedy else logits_to_keep
            arguments = checked(input_ids, attention_mask, position_ids, keep, self._vocabulary)
            past = given_cache({"past_key_values": past_key_values, "cache": cache})
            has_past = past is not None
            wanted = use_cache if use_cache is not None else has_past or self.config.use_cache
            split = self._packs and packs_sequences(attention_mask, past, wanted)
            paged_cache = self._cache_for(past, use_cache)
            columns = arguments.columns
            guesses = None if paged_cache is None or routing is not None else paged_cache.guesses
            if paged_cache is not None and guesses is not None and isinstance(columns, range):
                run = partial(self._run_rows, paged_cache)
                results = run_guessed(arguments, len(columns), paged_cache, guesses, run)
            else:
                packed = pack(
                    arguments.input_ids,
                    arguments.attention_mask,
                    arguments.position_ids,
                    [columns] if isinstance(columns, int) else columns,
                    paged_cache.real if has_past and paged_cache is not None else None,
                    split,
                )
                if paged_cache is None:
                    check_lengths(packed.starts, self.max_seq_len)
                output = "tokens" if greedy else "logits"
                rows, choices = self._run(packed, paged_cache, output, routing)
                results = packed.unpack(rows)
        assert input_ids is not None
        results = results.to(input_ids.device)
        returned: Any = paged_cache if wanted else None
        if greedy:
            return GreedyOutput(tokens=results[:, -1], **{CACHE: returned})
        results = results[:, 0] if isinstance(columns, int) else results
        given_back = (
            CausalLMOutputWithPast(logits=results, **{CACHE: returned})
            if routing is None
            else routed_output(results, choices, packed, self.config, **{CACHE: returned})
        )
        as_tuple = return_dict is False or (return_dict is None and not self.config.return_dict)
        return given_back.to_tuple() if as_tuple else given_back

    def _run_rows(self, cache: PagedCache, packed: Packed, rows: bool) -> torch.Tensor:
        """Run a step, with its tokens as rows if `rows` is true; return its logits."""
        return self._run(packed, cache, "logits", None, rows)[0]

    def _run(
        self,
        packed: Packed,
        cache: PagedCache | None,
        output: str,
        routing: Routing | None,
        rows: bool = False,
    ) -> tuple[torch.Tensor, list[Routed]]:
        """Run a step; return its result, and the choices of routers if they are requested."""
        self._steps += 1
        if cache is None:
            return self._result(Step(packed.inputs(), output, routing=routing))
        with cache.append(packed.sequences, batch=packed.real.shape[0]) as placed:
            inputs = packed.inputs() | placed.inputs()
            more: Any = {"states": placed.states, "routing": routing, "rows": rows}
            return self._result(Step(inputs, output, placed.blocks, placed.copies, **more))

    def _result(self, step: Step) -> tuple[torch.Tensor, list[Routed]]:
        output = self._ranks.run(step)
        if step.routing is None:
            return output, []
        return unpacked(output, step, self.dtype, self._rank_modules[0].routers)

    def new_cache(self) -> PagedCache:
        """Return an empty KV cache to pass as `past_key_values`, or `cache`."""
        layers = self.config.num_hidden_layers
        return PagedCache(self._cache_pool, layers, self.max_seq_len, self.max_batch)

    def _cache_for(self, cache: Any, use_cache: bool | None) -> PagedCache | None:
        if cache is None:
            return self.new_cache() if self._pool is not None or use_cache else None
        if not isinstance(cache, PagedCache) or cache.pool is not self._pool:
            raise UsageError(
                f"{CACHE} must be a cache of this model",
                got=type(cache).__name__,
                hint=f"Pass {CACHE} of an earlier call, or model.new_cache()",
            )
        return cache

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run Hugging Face's `generate`: greedy, sampling, beams, streamers, stopping criteria."""
        with self._open_calls.enter(), library_errors():
            self._check_open()
            refuse_code(kwargs.get("custom_generate"), kwargs.get("trust_remote_code"))
            self.new_cache()  # raises if the pipeline has no KV cache
            refuse_options({"inputs_embeds": kwargs.get("inputs_embeds")})
            names = [name for name in ("inputs", "input_ids") if kwargs.get(name) is not None]
            for ids in (*args[:1], *(kwargs[name] for name in names)):
                if ids is not None:
                    check_ids(ids, self._vocabulary)
            if kwargs.get("attention_mask") is not None:
                check_mask(kwargs["attention_mask"])
            self._ranks.agree()
            return super().generate(*args, **renamed(kwargs))

    def __repr__(self) -> str:
        return f"CompiledModel({type(self).__name__}, tp={self.tp}, dtype={self.dtype})"

    def close(self) -> None:
        """End the ranks and free their memory; plan, stages and sources remain available."""
        self._ranks.close()

    def _check_open(self) -> None:
        check_open(self._ranks.closed)


def _class_name(captured: Captured) -> str:
    if captured.model is not None:
        return type(captured.model).__name__
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    return str(classes[type(captured.config)].__name__)
