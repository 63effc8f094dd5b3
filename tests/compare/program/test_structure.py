"""Tests of the groups derived from a sharded graph."""

from __future__ import annotations

import pytest

from tests.compare.program.cases import QWEN2, QWEN3, SPANS, case_of
from tests.models import preset_pair
from tests.stages import stages_of
from tpcompile.compare.groups import Group, Key
from tpcompile.compare.program.structure import structure_of
from tpcompile.errors import UnsupportedError
from tpcompile.ir.ops import ROPE, SWIGLU
from tpcompile.passes.pipeline import decode_pipeline
from tpcompile.rewriting.rewrite import calls


def groups_of(model: str, tp: int, interleaved: bool = False) -> dict[Key, Group]:
    case = case_of(model, tp, interleaved=interleaved)
    return {group.key: group for group in case.steps[0].step.groups}


def test_columns_lie_on_the_ranks_as_their_heads_do() -> None:
    groups = groups_of(QWEN3, 3)
    q, k = groups["q", 1], groups["k_rotated", 1]
    assert (q.columns, q.head, q.width) == (96, "head", 16)
    assert [q.intervals(rank) for rank in range(3)] == [((0, 32),), ((32, 64),), ((64, 96),)]
    assert (k.columns, k.head, k.width) == (32, "kv head", 16)
    assert [k.intervals(rank) for rank in range(3)] == [((0, 16),), ((0, 32),), ((16, 32),)]
    assert groups["q_rotated", 1].layout == groups["attention", 1].layout == q.layout


def test_partials_have_the_spans_of_a_head_beside_each_other() -> None:
    groups = groups_of(QWEN3, 3)
    lse, values = groups["partial_lse", 0], groups["partial_values", 0]
    assert (lse.columns, lse.width, lse.spans) == (6 * SPANS, SPANS, SPANS)
    assert (values.columns, values.width) == (96 * SPANS, 16 * SPANS)
    assert lse.intervals(1) == ((2 * SPANS, 4 * SPANS),)
    assert values.intervals(1) == ((32 * SPANS, 64 * SPANS),)


def test_the_cache_has_a_row_for_each_token() -> None:
    k = groups_of(QWEN3, 1)["k_cached", 0]
    assert (k.rows, k.lengths, k.columns) == (16, (9, 6, 1), 32)


def test_what_is_whole_on_all_ranks_and_what_is_not() -> None:
    groups = groups_of(QWEN2, 3)
    whole = {name for name, _ in groups if groups[name, _].layout is None}
    assert whole == {
        "embedding",
        "norm",
        "attention_residual",
        "mlp_norm",
        "mlp_residual",
        "final_norm",
        "token",
    }
    assert [groups["logits", None].extent(rank) for rank in range(3)] == [338, 338, 337]


def test_pairs_side_by_side_are_in_what_was_projected_to_rotate() -> None:
    groups = groups_of(QWEN3, 2, interleaved=True)
    turned = {name for (name, _), group in groups.items() if group.interleaved}
    rotated = {f"{part}{step}" for part in "qk" for step in ("", "_normed", "_rotated")}
    assert turned == {*rotated, "k_cached"}
    assert not any(group.interleaved for group in groups_of(QWEN3, 2).values())


@pytest.mark.parametrize(
    ("target", "expected"),
    [(SWIGLU, "an MLP in each layer"), (ROPE, "rope as the last op on queries and keys")],
)
def test_a_graph_with_other_layers_is_refused(target: object, expected: str) -> None:
    passes = decode_pipeline(1, 2, 4)
    stages = stages_of(preset_pair("tiny-qwen3"), passes)
    gm = next(stage.graph for stage in stages if stage.name == "cache-kv")
    node = calls(gm, target)[0]
    node.replace_all_uses_with(node.all_input_nodes[0])
    gm.graph.erase_node(node)
    with pytest.raises(UnsupportedError, match=expected):
        structure_of(gm, 2)
