"""Decode steps of a small real model on the reference machine, with a prefilled cache.

The torch backend's graph fills the cache, in scattered blocks. The remaining tokens are then given
one by one, so that a single forward pass of Hugging Face gives the expected logits of all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
from torch import fx
from transformers import AutoConfig

from benchmarks.mutations.subjects import in_few_bits
from tests.captures import captured_once
from tests.models import Pair, few_bits_pair, padded, pair_of, preset_pair
from tests.runtime.eager_pair import enlivened
from tests.stages import stages_of
from tpcompile.backends.executor import Executor
from tpcompile.backends.memory import StepMemory
from tpcompile.backends.reference import Machine
from tpcompile.backends.reference.orders import Order, in_program_order
from tpcompile.backends.rotation import CPU, Rotation, rotation_of
from tpcompile.compare.rounded_cache import RoundedCache
from tpcompile.ir.info import info_of
from tpcompile.ir.kv import nan_element
from tpcompile.ir.simulate import components, materialise, run_ranks
from tpcompile.passes.cache_kv import CACHE, CacheKv, kv_format
from tpcompile.passes.fuse_delta import FuseDelta
from tpcompile.passes.pipeline import decode_pipeline
from tpcompile.passes.plan_sharding import PlanSharding
from tpcompile.presets import preset
from tpcompile.rewriting.linears import fuse_linears
from tpcompile.rewriting.manager import Pass, clone
from tpcompile.rewriting.rewrite import Report, fuse_at
from tpcompile.rewriting.structure import delta_blocks
from tpcompile.runtime.cache_name import CACHE as CACHE_NAME
from tpcompile.runtime.ranks.rank import cache_shape, states_shapes
from tpcompile.runtime.weights import ModelWeights
from tpcompile.vm.lowering import StepPlan
from tpcompile.vm.program import Program
from tpcompile.vm.schedule.policies import POLICIES
from tpcompile.vm.schedule.scheduled import scheduled
from tpcompile.vm.targets import target_of

BLOCK = 4
STEPS = 32
EDGES = (1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK - 2)
"""Lengths including the first new token: around block boundaries, and several blocks long."""
LONGEST = 64
"""The maximum number of tokens per sequence."""


EVEN = "even"
"""A model that 8 ranks split evenly (heads, widths, vocabulary), with biases and per-head norms."""
BIASED = "biased"
"""A model with a bias in all linears except the head."""
APART = "apart"
"""The same model, with a weight each for queries, keys, values, gate and up."""
DELTA_APART = "delta-apart"
"""`tiny-qwen3.5`, with a weight each for the channels of linear attention and for their gates."""
WINDOWED = "windowed"
"""A model whose second layer attends to a window of five tokens."""
WIDE_HEADS = "wide-heads"
"""A model with one layer, whose heads fill several vectors and half of one more."""
GELU, GELU_TANH, RELU, RELU2 = "gelu", "gelu-tanh", "relu", "relu2"
"""Models with this activation, of which that of `RELU2` has no gate. Their linears have a bias, and
weights are spread out, so that activations give different logits."""
INT4, INT4_WIDE, INT8 = "int4:32:offsets", "int4:48", "int8:row"
"""Models with weights of few bits, except in the embedding and in the head that is tied to it. Two
ranks cut groups of 32 columns, and three those of 48. That with int8 has a head of its own."""
INT4_EXPERTS = "experts in int4"
"""The model `EXPERTS` with weights of four bits. Two ranks hold whole groups of 32 columns of the
experts' results, and five cut them."""
_FEW_BITS = (INT4, INT4_WIDE, INT8, INT4_EXPERTS)
FEW_TOKENS = "few-tokens"
"""`tiny-qwen3` with a smaller vocabulary, for executors that take seconds per step."""
ONE_LAYER = "one-layer"
"""The same with one layer, for tests of tiles, which are the same in every layer."""
HYBRID = "hybrid"
"""`tiny-qwen3.5` with one layer of each kind and a smaller vocabulary. Two value heads read each of
its three key heads, its convolution has four taps, and a quarter of a head is rotated."""
HYBRID_ODD = "hybrid-odd"
"""The same with three taps, and heads whose widths are no powers of two."""
HYBRID_SHORT = "hybrid-short"
"""The same with two taps, as many value heads as key heads, and heads that are rotated whole."""
EXPERTS = "experts"
"""A model of Qwen3-MoE: an MLP in its first layer, and in its second one six experts, of which a
token chooses two."""
WHOLE = "whole experts"
"""The same, of which ranks hold whole experts."""
SHARED = "shared expert"
"""A model of Qwen2-MoE, which has an expert for all tokens beside seven of which they choose three.
Scores do not add up to 1."""
HYBRID_EXPERTS = "hybrid-experts"
"""A model of Qwen3.5-MoE, with linear attention, attention with gates, and a shared expert."""
ONE_OF_TWO, EIGHT_OF_MANY = "one of two experts", "eight of 16 experts"
"""Models with one layer, of Qwen3-MoE and of Qwen2-MoE with a shared expert."""
_HYBRID = {
    **preset("tiny-qwen3.5"),
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "vocab_size": 199,
}
_EXPERTS = {
    **preset("tiny-qwen3"),
    "model_type": "qwen3_moe",
    "vocab_size": 199,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
    "tie_word_embeddings": False,
}
_SHARED = {
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
_QWEN2_MOE = {
    **preset("tiny-qwen2"),
    "model_type": "qwen2_moe",
    "vocab_size": 199,
    "norm_topk_prob": False,
    **_SHARED,
}
_CUT = {**preset("tiny-qwen3"), "intermediate_size": 192, "vocab_size": 199}
OWN = {
    FEW_TOKENS: {**preset("tiny-qwen3"), "vocab_size": 199},
    ONE_LAYER: {**preset("tiny-qwen3"), "vocab_size": 199, "num_hidden_layers": 1},
    EVEN: {
        **preset("tiny-qwen3"),
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "hidden_size": 128,
        "intermediate_size": 256,
        "vocab_size": 1024,
        "attention_bias": True,
    },
    **{
        name: {
            **preset("tiny-qwen3"),
            "model_type": "llama",
            "hidden_size": 96,
            "vocab_size": 199,
            "attention_bias": True,
            "mlp_bias": True,
        }
        for name in (BIASED, APART)
    },
    **{
        name: {
            **preset("tiny-qwen2"),
            "model_type": kind,
            "vocab_size": 199,
            "hidden_size": 48,
            "intermediate_size": 80,
            "hidden_act": activation,
            "mlp_bias": True,
        }
        for name, kind, activation in (
            (GELU, "llama", "gelu"),
            (GELU_TANH, "llama", "gelu_pytorch_tanh"),
            (RELU, "llama", "relu"),
            (RELU2, "arcee", "relu2"),
        )
    },
    DELTA_APART: preset("tiny-qwen3.5"),
    WINDOWED: {
        **preset("tiny-qwen2"),
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "vocab_size": 199,
    },
    WIDE_HEADS: {
        **preset("tiny-qwen3"),
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 104,
        "num_hidden_layers": 1,
        "vocab_size": 199,
    },
    HYBRID: _HYBRID,
    HYBRID_ODD: {
        **_HYBRID,
        "linear_conv_kernel_dim": 3,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 20,
        "head_dim": 24,
        "attention_bias": True,
        "rope_parameters": {**_HYBRID["rope_parameters"], "partial_rotary_factor": 0.5},
    },
    HYBRID_SHORT: {
        **_HYBRID,
        "linear_conv_kernel_dim": 2,
        "linear_num_value_heads": 3,
        "rope_parameters": {**_HYBRID["rope_parameters"], "partial_rotary_factor": 1.0},
    },
    EXPERTS: _EXPERTS,
    WHOLE: _EXPERTS,
    SHARED: _QWEN2_MOE,
    ONE_OF_TWO: {
        **_EXPERTS,
        "num_hidden_layers": 1,
        "mlp_only_layers": [],
        "num_experts": 2,
        "num_experts_per_tok": 1,
    },
    EIGHT_OF_MANY: {
        **_QWEN2_MOE,
        "num_hidden_layers": 1,
        "num_experts": 16,
        "num_experts_per_tok": 8,
    },
    HYBRID_EXPERTS: {**_HYBRID, "model_type": "qwen3_5_moe_text", **_SHARED},
    INT4: in_few_bits(_CUT, 4, 32, offsets=True),
    INT4_WIDE: in_few_bits({**_CUT, "hidden_size": 96}, 4, 48),
    INT4_EXPERTS: in_few_bits(
        {**_EXPERTS, "intermediate_size": 192, "moe_intermediate_size": 192}, 4, 32, offsets=True
    ),
    INT8: in_few_bits({**_CUT, "tie_word_embeddings": False}, 8, ignore=()),
}
"""Configurations of the models that are not presets."""


@lru_cache(maxsize=32)
def pair_named(model: str) -> Pair:
    """Return a scaled-down preset, or a model defined above."""
    if model in (GELU, GELU_TANH, RELU, RELU2):
        eager = enlivened(AutoConfig.for_model(**OWN[model]))
        return Pair(captured_once(eager), eager, ModelWeights(eager))
    if model in _FEW_BITS:
        return few_bits_pair(AutoConfig.for_model(**OWN[model]))
    if model in (EXPERTS, WHOLE, SHARED, HYBRID_EXPERTS):
        eager = lively_experts(model)
        return Pair(captured_once(eager), eager, ModelWeights(eager))
    if model in OWN:
        return pair_of(AutoConfig.for_model(**OWN[model]))
    return preset_pair(model)


def lively_experts(model: str = EXPERTS) -> Any:
    """Return a new eager model with experts, of which the routers choose different ones."""
    return with_lively_routers(enlivened(AutoConfig.for_model(**OWN[model])))


def with_lively_routers(eager: Any) -> Any:
    """Draw the routers of a model, which choose the same experts for all tokens if they are new."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in eager.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data.normal_(std=0.3, generator=generator)
    return eager


def rotated_whole(model: str) -> bool:
    """Return whether a model rotates whole heads, so that their halves can be interleaved."""
    config = pair_named(model).captured.config
    return config.rope_parameters.get("partial_rotary_factor", 1.0) == 1.0


@dataclass(frozen=True)
class Case:
    """The model, its lowering and its schedule."""

    model: str
    tp: int = 1
    lengths: tuple[int, ...] = EDGES
    spans: int = 2
    lowering: str = "heads"
    interleaved: bool = False
    policy: str = "critical-path"
    workers: int = 3
    blocks_per_worker: int = 1
    column_splits: int = 1
    kv: str = CacheKv.kv
    rows: tuple[int, ...] = ()
    """The rows of each sequence in a step; empty for one each."""

    @property
    def pair(self) -> Pair:
        return pair_named(self.model)

    @property
    def graph(self) -> fx.GraphModule:
        return _graphs(self.model, self.tp, self.spans, self.interleaved, self.kv)[1]

    @property
    def plan(self) -> StepPlan:
        return StepPlan(
            self.workers,
            batch=sum(self.rows) or len(self.lengths),
            sequence_rows=sum(self.rows) or 1,
            max_seq_len=LONGEST,
            context=LONGEST,
            lowering=self.lowering,
            column_splits=self.column_splits,
            grain=4,
            blocks_per_worker=self.blocks_per_worker,
            steps=STEPS,
        )

    @property
    def program(self) -> Program:
        return _program(self)

    def machine(self) -> Machine:
        """Return a reference machine whose cache holds all tokens before the first step."""
        return Machine(self.memory())

    def memory(
        self, poison: bool = True, device: torch.device = CPU, apart: bool = False
    ) -> StepMemory:
        """Return such a memory for any executor, on any device."""
        weights = _weights(self.model, self.tp, self.interleaved)
        kept = _prefilled(self.model, self.tp, self.lengths, self.interleaved, self.kv)
        caches, *states = [[one.clone().to(device) for one in kept[name]] for name in kept]
        states = [[_with_more(one, sum(self.rows)) for one in each] for each in states]
        return StepMemory(
            self.program,
            lambda rank, name: weights[name][rank].to(device),
            self.rotation,
            caches,
            [dict(zip(list(kept)[1:], own, strict=True)) for own in zip(*states, strict=True)],
            poison=poison,
            device=device,
            apart=apart,
        )

    @property
    def rotation(self) -> Rotation:
        """Return cosines and sines of all positions that the program supports."""
        return rotation_of(self.program, self.pair.captured.rotary.fresh())


def schedules(workers: Sequence[int]) -> Iterator[tuple[str, int, str]]:
    """Yield policies, numbers of workers and lowerings: all pairs of values, not all triples.

    A lowering makes the instructions, a policy orders them by their costs, and queues get them in
    that order, so each depends on the one before it only.
    """
    for number, policy in enumerate(POLICIES):
        for place, count in enumerate(workers):
            yield policy, count, ("heads", "rows")[(number + place) % 2]


@lru_cache(maxsize=64)
def _program(case: Case) -> Program:
    found = scheduled(case.graph, target_of("cpu", case.workers), case.plan, case.policy)
    assert not found.faults, found.faults[0]
    return found.program


@lru_cache(maxsize=64)
def _graphs(
    model: str, tp: int, spans: int, interleaved: bool, kv: str = CacheKv.kv
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the graph that can prefill, and the decode graph lowered from it."""
    passes = decode_passes(model, tp, spans, BLOCK, interleaved, kv)
    stages = stages_of(pair_named(model), passes)
    return next(s.graph for s in stages if s.name == "keep-states"), stages[-1].graph


def decode_passes(
    model: str,
    tp: int,
    spans: int,
    block: int,
    interleaved: bool = False,
    kv: str = CacheKv.kv,
) -> list[Pass]:
    """Return the pipeline of a model's decode steps."""
    passes = decode_pipeline(tp, spans, block, interleaved, kv)
    apart = ("fuse-qkv", "fuse-gate-up") if model == APART else ()
    if model == DELTA_APART:
        passes = with_delta_apart(passes)
    if model == WHOLE:
        passes = [
            replace(one, experts="ep") if isinstance(one, PlanSharding) else one for one in passes
        ]
    return [one for one in passes if one.name not in apart]


@dataclass(frozen=True)
class _FuseGates:
    """`fuse-delta` of weights of which only those of shares and decays have the same format."""

    name: ClassVar[str] = FuseDelta.name

    def apply(self, gm: fx.GraphModule) -> Report:
        blocks = delta_blocks(gm.graph)
        return fuse_at(
            gm,
            ((one.rule, partial(fuse_linears, gm, [one.beta, one.a])) for one in blocks),
        )


def with_delta_apart(passes: Sequence[Pass]) -> list[Pass]:
    """Return passes that leave the channels of linear attention and their gates apart."""
    return [_FuseGates() if isinstance(one, FuseDelta) else one for one in passes]


def _with_more(states: torch.Tensor, count: int) -> torch.Tensor:
    """Return states with so many more, which are NaN."""
    shape = (states.shape[0], count, *states.shape[2:])
    return torch.cat([states, torch.full(shape, torch.nan, dtype=states.dtype)], 1).to(states)


@lru_cache(maxsize=8)
def _weights(model: str, tp: int, interleaved: bool) -> dict[str, list[torch.Tensor]]:
    graph, read = _graphs(model, tp, 1, interleaved)[1], pair_named(model).read
    return materialise(graph, read) | components(graph, read)


def texts(model: str, lengths: Sequence[int], steps: int = STEPS) -> list[torch.Tensor]:
    """Return the tokens of each sequence, including those of all steps."""
    vocabulary = pair_named(model).captured.config.vocab_size
    longer = [length + steps - 1 for length in lengths]
    ids, mask = padded(longer, vocabulary)
    return [row[kept.bool()] for row, kept in zip(ids, mask, strict=True)]


def tables_of(lengths: Sequence[int], steps: int = STEPS) -> torch.Tensor:
    """Return block tables with room for all steps; blocks are assigned round-robin, in reverse."""
    held = [-(-(length + steps) // BLOCK) for length in lengths]
    tables = torch.full((len(lengths), max(held)), -1)
    block = 0
    for place in range(max(held)):
        for row, count in enumerate(held):
            if place < count:
                tables[row, place] = block
                block += 1
    return tables.where(tables < 0, block - 1 - tables)


@lru_cache(maxsize=16)
def _prefilled(
    model: str, tp: int, lengths: tuple[int, ...], interleaved: bool, kv: str
) -> dict[str, list[torch.Tensor]]:
    """Return each rank's cache, and its states if the model has any, by the names of inputs.

    They hold all tokens but the last; all other slots, and as many states again, are NaN.
    """
    pair = pair_named(model)
    gm = clone(_graphs(model, tp, 1, interleaved, kv)[0])
    blocks = int(tables_of(lengths).max()) + 1
    kept: dict[str, list[torch.Tensor]] = {CACHE: []}
    for rank in range(info_of(gm).tp):
        shape = cache_shape(gm, rank)
        assert shape is not None and shape.block == BLOCK
        kept[CACHE].append(shape.allocate(blocks, CPU))
        for one in states_shapes(gm, rank):
            kept.setdefault(one.name, []).append(one.allocate(2 * len(lengths), CPU))
    for one in (tensor for own in kept.values() for tensor in own):
        one.fill_(nan_element(one))
    inputs = _prompt(model, lengths)
    if len(inputs["input_ids"]):
        weights = materialise(gm, pair.read) | kept
        for node in gm.graph.nodes:
            if node.name in kept:
                node.op = "get_attr"  # they are given per rank, like weights
        with torch.inference_mode():
            run_ranks(gm, inputs, weights, pair.captured.rotary.fresh())
    return kept


def _prompt(model: str, lengths: Sequence[int]) -> dict[str, torch.Tensor]:
    rows = [row[: length - 1] for row, length in zip(texts(model, lengths), lengths, strict=True)]
    counts = torch.tensor([len(row) for row in rows])
    places = [torch.arange(len(row)) for row in rows]
    slots = [
        table[place // BLOCK] * BLOCK + place % BLOCK
        for table, place in zip(tables_of(lengths), places, strict=True)
    ]
    return {
        "input_ids": torch.cat(rows),
        "positions": torch.cat(places),
        "starts": torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]),
        "logit_rows": torch.arange(int(counts.sum())),
        "slots": torch.cat(slots),
        "tables": tables_of(lengths),
        "lengths": counts,
        "read": torch.arange(len(rows)),
        "write": torch.arange(len(rows)),
    }


@lru_cache(maxsize=16)
def eager_logits(model: str, lengths: tuple[int, ...], kv: str = CacheKv.kv) -> list[torch.Tensor]:
    """Return Hugging Face's logits of all tokens of each sequence."""
    eager, stored = pair_named(model).eager, kv_format(kv)
    past = [
        {} if stored is None else {CACHE_NAME: RoundedCache(stored, eager.config)} for _ in lengths
    ]
    with torch.inference_mode():
        return [
            eager(row[None], **own).logits[0]
            for row, own in zip(texts(model, lengths), past, strict=True)
        ]


def steps_of(
    case: Case,
    steps: int = STEPS,
    order: Callable[[int], Order] = lambda step: in_program_order,
) -> list[torch.Tensor]:
    """Return the logits of each step on the reference machine, `[batch, vocabulary]`."""
    return steps_on(case.machine(), case, steps, lambda step: (order(step),))


def steps_on(
    executor: Executor,
    case: Case,
    steps: int = STEPS,
    options: Callable[[int], tuple[Any, ...]] = lambda step: (),
) -> list[torch.Tensor]:
    """Return the logits of each step on any executor."""
    found = []
    for step in range(steps):
        place(executor, case, step)
        executor.run(1, *options(step))
        found.append(executor.logits.clone())
    return found


def place(executor: Any, case: Case, step: int = 0, **options: Any) -> None:
    """Place the tokens of a step."""
    rows, lengths = texts(case.model, case.lengths), torch.tensor(case.lengths) + step
    tokens = [row[length - 1] for row, length in zip(rows, lengths.tolist(), strict=True)]
    executor.place(torch.stack(tokens), lengths, tables_of(case.lengths), **options)


def worst_error(case: Case, found: Sequence[torch.Tensor]) -> float:
    """Return the largest error of any step, relative to the largest logit of that step."""
    eager = eager_logits(case.model, case.lengths, case.kv)
    worst = 0.0
    for step, logits in enumerate(found):
        places = [length - 1 + step for length in case.lengths]
        wanted = torch.stack([row[at] for row, at in zip(eager, places, strict=True)])
        error = float((logits - wanted).abs().max() / wanted.abs().max())
        assert error == error, f"step {step} has NaN logits"
        worst = max(worst, error)
    return worst
