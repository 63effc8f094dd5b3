"""Embedding and head are split by vocabulary, and tied weights remain one parameter."""

from __future__ import annotations

from transformers import Qwen2Config

from tests.models import VOCABULARY, batch, pair_of, stage_logits
from tests.passes.graphs import attention_graph, refusal
from tests.passes.steps import step
from tests.stages import stages_of
from tpcompile.ir.meta import operand, value_type
from tpcompile.ir.ops import EMBEDDING, REDISTRIBUTE, VOCAB_EMBEDDING
from tpcompile.ir.types import DISJOINT
from tpcompile.passes import default_pipeline
from tpcompile.passes.vocab_parallel import VocabParallel
from tpcompile.rewriting.manager import Stage
from tpcompile.rewriting.rewrite import calls
from tpcompile.rewriting.structure import embedding_of, head_of, weight_of


def test_one_rank_keeps_everything() -> None:
    assert step("vocab-parallel", tp=1).matches == 0


def test_rows_are_looked_up_with_their_offset_and_summed() -> None:
    gm = step("vocab-parallel").after.graph
    assert not calls(gm, EMBEDDING)
    (embedding,) = calls(gm, VOCAB_EMBEDDING)
    assert value_type(embedding).placement == DISJOINT
    (total,) = embedding.users
    assert total.target is REDISTRIBUTE


def test_logits_are_gathered() -> None:
    gm = step("vocab-parallel").after.graph
    head = head_of(gm.graph)
    assert value_type(head).layout_of(1) == value_type(weight_of(head)).layout_of(0) is not None
    (gathered,) = head.users
    assert gathered.target is REDISTRIBUTE
    assert operand(next(node for node in gm.graph.nodes if node.op == "output")) is gathered


def _untied(stage: str) -> tuple[Stage, Stage]:
    config = Qwen2Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    pair = pair_of(config)
    stages = stages_of(pair, default_pipeline(3))
    place = [current.name for current in stages].index(stage)
    packed = batch((3, 1))
    before, after = (stage_logits(s.graph, pair, packed) for s in stages[place - 1 : place + 1])
    assert (before - after).abs().max() < 1e-5 * before.abs().max()
    return stages[place - 1], stages[place]


def test_tied_weights_are_one_parameter_and_untied_ones_two() -> None:
    graph = step("vocab-parallel").after.graph.graph
    assert weight_of(head_of(graph)) is operand(embedding_of(graph))
    _, untied = _untied("vocab-parallel")
    table, weight = (
        operand(embedding_of(untied.graph.graph)),
        weight_of(head_of(untied.graph.graph)),
    )
    assert table is not weight
    assert value_type(table).layout_of(0) == value_type(weight).layout_of(0) is not None
    assert untied.stats.matches == 2


def test_a_plan_must_come_first() -> None:
    message = refusal(VocabParallel(), attention_graph())
    assert "The graph has no plan" in message
    assert "Put plan-sharding before this pass" in message
