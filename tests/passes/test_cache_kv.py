"""Tests of attention with a KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx

from tests.models import TOLERANCE, Pair, eager_logits, padded, preset_pair, relative_error
from tests.passes.graphs import GraphBuilder, attention_graph, refusal
from tests.passes.steps import step
from tests.stages import graph_after
from tpcompile.backends.torch_tp import emit_sources, load_rank, run_simulated
from tpcompile.comm import SimulatedGroup
from tpcompile.errors import PassError, UsageError
from tpcompile.ir.checker import check_graph
from tpcompile.ir.info import info_of
from tpcompile.ir.layout import TokenLayout
from tpcompile.ir.meta import operand, type_of, value_type
from tpcompile.ir.ops import ATTENTION, PAGED_ATTENTION, SPECS
from tpcompile.ir.simulate import materialise
from tpcompile.ir.types import PARTIAL, Placement, Shard, ValueType
from tpcompile.passes import decode_pipeline, for_ranks, parse_pipeline, run_passes
from tpcompile.passes.cache_kv import CACHE, CacheKv, block_size
from tpcompile.passes.pipeline import Standard
from tpcompile.rewriting.rewrite import calls

aten = torch.ops.aten
LAYER = SPECS[PAGED_ATTENTION].argument_names.index("layer")


@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
def test_matches_every_attention(model: str) -> None:
    assert step("cache-kv", model).matches == 2
    assert not calls(step("cache-kv", model).after.graph, ATTENTION)


@pytest.mark.parametrize(("model", "tp"), [("tiny-qwen2", 3), ("tiny-qwen3", 4), ("qwen2.5-7b", 3)])
def test_a_cache_lies_as_the_keys_do(model: str, tp: int) -> None:
    gm = step("cache-kv", model, tp).after.graph
    cache = next(node for node in gm.graph.nodes if node.name == CACHE)
    keys = value_type(operand(calls(gm, PAGED_ATTENTION)[0], 1))
    assert value_type(cache).layout_of(3) == keys.layout_of(1) is not None
    assert value_type(cache).shape == (2, 2, "C", *keys.shape[1:])
    assert {user.target for user in cache.users} == {PAGED_ATTENTION}


def test_inputs_come_behind_the_others_in_order() -> None:
    gm = step("cache-kv").after.graph
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    assert [node.name for node in inputs[4:]] == ["slots", "tables", "lengths", CACHE]
    kinds = [type_of(node) for node in inputs[4:7]]
    assert kinds == [ValueType(shape, torch.long) for shape in (("T",), ("N", "B"), ("N",))]
    assert info_of(gm).outputs == info_of(step("cache-kv").before.graph).outputs


# Later steps, which read the cache.


class Decoder:
    """Emitted modules with their caches; all sequences use blocks of one pool."""

    def __init__(self, pair: Pair, tp: int, block: int, blocks: Sequence[int]) -> None:
        passes = for_ranks(Standard(block).passes(), tp)
        self.gm = graph_after(pair, passes)
        self.group = SimulatedGroup(tp)
        self.load(pair)
        self.block, self.blocks = block, list(blocks)
        cache = next(node for node in self.gm.graph.nodes if node.name == CACHE)
        self.caches = [
            torch.full(
                [extent if isinstance(extent, int) else 64 * block for extent in shape], torch.nan
            )
            for shape in (value_type(cache).local_shape(rank) for rank in range(tp))
        ]
        self.held: list[list[int]] = []
        self.lengths: list[int] = []

    def load(self, pair: Pair) -> None:
        """Load the modules of the current graph."""
        weights = materialise(self.gm, pair.read)
        self.modules = [
            load_rank(
                source,
                rank,
                {name: parts[rank] for name, parts in weights.items()},
                pair.captured.rotary.fresh(),
                self.group.rank(rank),
            )
            for rank, source in enumerate(emit_sources(self.gm))
        ]

    def step(self, new: Sequence[torch.Tensor], output: str = "logits") -> list[torch.Tensor]:
        """Append new tokens to each sequence; return the logits of all of them."""
        self.held = self.held or [[] for _ in new]
        self.lengths = self.lengths or [0] * len(new)
        slots, positions = [], []
        for row, ids in enumerate(new):
            for token in range(self.lengths[row], self.lengths[row] + len(ids)):
                if token == len(self.held[row]) * self.block:
                    self.held[row].append(self.blocks.pop(0))
                slots.append(self.held[row][token // self.block] * self.block + token % self.block)
                positions.append(token)
            self.lengths[row] += len(ids)
        widest = max(map(len, self.held))
        inputs: dict[str, Any] = {
            "input_ids": torch.cat(list(new)),
            "positions": torch.tensor(positions),
            "starts": torch.tensor([0, *map(len, new)]).cumsum(0),
            "logit_rows": torch.arange(len(positions)),
            "slots": torch.tensor(slots),
            "tables": torch.tensor([[*held, *[-1] * (widest - len(held))] for held in self.held]),
            "lengths": torch.tensor(self.lengths),
            "output": output,
        }
        per_rank = [{**inputs, CACHE: cache} for cache in self.caches]
        return run_simulated(self.modules, self.group, per_rank)


@pytest.mark.parametrize("tp", [1, 3, 4])
@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
def test_step_by_step_gives_the_logits_of_the_whole(model: str, tp: int) -> None:
    """Trap 14: chunks, single tokens and mixed steps give the logits of the whole sequences."""
    pair = preset_pair(model)
    lengths = (9, 6)
    ids, mask = padded(lengths, 1013)
    rows = [row[real.bool()] for row, real in zip(ids, mask, strict=True)]
    decoder = Decoder(pair, tp, 4, blocks=[5, 0, 6, 2, 9, 1])
    expected = eager_logits(pair.eager, lengths).split(lengths)
    done = [0, 0]
    for counts in ((5, 1), (1, 4), (3, 1)):
        ends = [start + count for start, count in zip(done, counts, strict=True)]
        new = [row[a:b] for row, a, b in zip(rows, done, ends, strict=True)]
        whole = torch.cat([e[a:b] for e, a, b in zip(expected, done, ends, strict=True)])
        for logits in decoder.step(new):
            assert relative_error(logits, whole) < TOLERANCE
        done = ends


def test_tokens_alone_keep_what_logits_keep() -> None:
    """The cache does not depend on which result a step returns."""
    pair = preset_pair("tiny-qwen3")
    ids = torch.arange(7) * 31
    decoders = [Decoder(pair, 2, 2, blocks=range(9)) for _ in range(2)]
    tokens = decoders[0].step([ids[:5]], "tokens")
    logits = decoders[1].step([ids[:5]])
    assert all(torch.equal(t, x.argmax(-1)) for t, x in zip(tokens, logits, strict=True))
    last = [decoder.step([ids[5:]]) for decoder in decoders]
    assert all(torch.equal(first, second) for first, second in zip(*last, strict=True))


def test_a_layer_in_the_place_of_another_is_refused_and_wrong() -> None:
    """Two attentions on one cache layer are refused; the logits differ from the second step on."""
    pair = preset_pair("tiny-qwen3")
    ids = torch.arange(6) * 31
    decoder, wrong = (Decoder(pair, 1, 4, blocks=range(4)) for _ in range(2))
    first, second = calls(wrong.gm, PAGED_ATTENTION)
    second.update_arg(LAYER, first.args[LAYER])
    (problem,) = check_graph(wrong.gm)
    assert (problem.rule, problem.node) == ("kv-cache", second.name)
    assert f"layer 0 of the cache, which %{first.name} writes too" in problem.got
    wrong.load(pair)
    (expected,), (actual,) = decoder.step([ids[:5]]), wrong.step([ids[:5]])
    assert torch.equal(actual, expected)
    (expected,), (actual,) = decoder.step([ids[5:]]), wrong.step([ids[5:]])
    assert relative_error(actual, expected) > 10 * TOLERANCE


# Graphs that cannot be cached.


def two_attentions(keys: tuple[int, int], places: tuple[int, int]) -> fx.GraphModule:
    """Return two attentions in sequence, with these KV heads and cache layers."""
    builder = GraphBuilder()
    x, starts = builder.input("x", "T", 16), builder.input("starts", "S", dtype=torch.int64)
    for place, (shared, layer) in enumerate(zip(keys, places, strict=True)):
        heads = [
            builder.heads(builder.linear(x, f"{name}{place}", count * 8, 16), 8)
            for name, count in (("q", 2), ("k", shared), ("v", shared))
        ]
        mixed = builder.call(ATTENTION, *heads, starts, 0.25, None, layer)
        x = builder.call(aten.flatten.using_ints, mixed, 1, 2)
    return builder.done(x)


def test_layers_with_other_keys_are_refused() -> None:
    message = refusal(CacheKv(), two_attentions((2, 1), (0, 1)))
    assert "The keys of %attention_1 must have the type of the keys of %attention" in message
    assert "f32[T, 1, 8]" in message and "f32[T, 2, 8]" in message


@pytest.mark.parametrize("places", [(0, 1), (3, 7), (3, 3)], ids=str)
def test_every_attention_has_a_layer_of_the_cache(places: tuple[int, int]) -> None:
    """Layers without attention have none, and two attentions of one layer have two."""
    gm = two_attentions((2, 2), places)
    assert CacheKv().apply(gm).matches == 2
    assert check_graph(gm) == []
    assert [node.args[LAYER] for node in calls(gm, PAGED_ATTENTION)] == [0, 1]
    cache = next(node for node in gm.graph.nodes if node.name == CACHE)
    assert value_type(cache).shape[0] == 2


def test_keys_with_a_batch_dimension_are_refused() -> None:
    with pytest.raises(PassError, match="cannot be cached") as refused:
        run_passes(preset_pair("tiny-qwen3").captured.graph, [CacheKv()])
    assert "after raise-attention" in str(refused.value)


@pytest.mark.parametrize("placement", [PARTIAL, Shard(0, TokenLayout(2))], ids=str)
def test_keys_in_no_cache_are_refused(placement: Placement) -> None:
    gm = attention_graph()
    keys = operand(calls(gm, ATTENTION)[0], 1)
    keys.meta["type"] = value_type(keys).placed(placement)
    message = refusal(CacheKv(), gm)
    assert "replicated or sharded by head" in message
    assert not calls(gm, PAGED_ATTENTION)


def test_a_graph_without_attention_keeps_nothing() -> None:
    builder = GraphBuilder()
    gm = builder.done(builder.linear(builder.input("x", "T", 16), "w", 8, 16))
    assert CacheKv().apply(gm).matches == 0
    assert [node.name for node in gm.graph.nodes if node.op == "placeholder"] == ["x"]


def test_the_size_of_a_block_is_an_option() -> None:
    gm = attention_graph()
    CacheKv(block=5).apply(gm)
    assert check_graph(gm) == []
    assert block_size(gm) == 5
    assert parse_pipeline("cache-kv{block=5}") == [CacheKv(5)]
    decode = graph_after(preset_pair("tiny-qwen3"), decode_pipeline(2, block=7))
    assert block_size(decode) == 7
    with pytest.raises(PassError, match="has no KV cache"):
        block_size(attention_graph())
    for block in (0, -3):
        with pytest.raises(UsageError, match=f"block must be at least 1 token, got {block}"):
            CacheKv(block).apply(attention_graph())
