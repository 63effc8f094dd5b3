"""Tests of the groups of layers with linear attention and with gated attention."""

from __future__ import annotations

import pytest
import torch

from tests.backends.reference.step_models import with_delta_apart
from tests.compare.program.cases import BATCH, HYBRID, case_of, tiny
from tests.models import TOLERANCE, relative_error
from tpcompile.compare.groups import Group, Key
from tpcompile.compare.program import prepare
from tpcompile.errors import UnsupportedError
from tpcompile.passes.pipeline import decode_pipeline

SHARED = [((0, 32), (48, 80)), ((16, 48), (64, 96))]
"""The channels of queries and keys on two ranks, which both hold the second of three key heads."""


def groups_of(tp: int) -> dict[Key, Group]:
    case = case_of(HYBRID, tp)
    return {group.key: group for group in case.steps[0].step.groups}


def test_inputs_of_linear_attention_are_fused_on_each_rank() -> None:
    groups = groups_of(2)
    values = [((96, 144), (192, 240)), ((144, 192), (240, 288))]
    for name, columns in (("projected", 288), ("tail", 192)):
        group = groups[name, 2]
        assert (group.columns, group.head) == (columns, "")
        expected = [
            (*keys, *v[: len(v) - (name == "tail")]) for keys, v in zip(SHARED, values, strict=True)
        ]
        assert [group.intervals(rank) for rank in range(2)] == expected
    gates = groups["gates", 2]
    assert [gates.intervals(rank) for rank in range(2)] == [((0, 3), (6, 9)), ((3, 6), (9, 12))]


def test_values_of_key_heads_and_of_value_heads() -> None:
    groups = groups_of(2)
    for name, unit, width, columns in (
        ("q_conv", "key head", 16, 48),
        ("k_conv", "key head", 16, 48),
        ("v_conv", "value head", 16, 96),
        ("decay", "value head", 1, 6),
        ("beta", "value head", 1, 6),
        ("state", "value head", 256, 6 * 256),
        ("delta_rule", "value head", 16, 96),
        ("mixed", "value head", 16, 96),
    ):
        group = groups[name, 2]
        assert (group.head, group.width, group.columns) == (unit, width, columns), name
    assert [groups["q_conv", 2].intervals(rank) for rank in range(2)] == [((0, 32),), ((16, 48),)]
    assert groups["state", 2].intervals(1) == ((3 * 256, 6 * 256),)


def test_the_tail_has_a_row_for_each_input_that_is_kept() -> None:
    tail = groups_of(1)["tail", 0]
    assert (tail.rows, tail.lengths) == (9, (3, 3, 3))
    assert [tail.sequence_of(row) for row in range(9)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_gated_attention() -> None:
    groups = groups_of(2)
    for name in ("attention_gate", "ungated", "attention"):
        group = groups[name, 3]
        assert (group.head, group.width, group.columns) == ("head", 16, 96), name
        assert group.intervals(1) == ((48, 96),)
    assert ("attention_gate", 2) not in groups


def test_layers_are_those_of_the_model() -> None:
    """Layers of the cache and of the states are numbered apart in the graph."""
    structure = case_of(HYBRID).structure
    assert [(layer.number, layer.place) for layer in structure.attention] == [(1, 0), (3, 1)]
    assert [(layer.number, layer.place) for layer in structure.deltas] == [(0, 0), (2, 1)]


def test_values_that_new_sequences_leave_behind() -> None:
    """The tail of a sequence of one token is zero but for that token."""
    side = case_of(HYBRID).steps[0].module
    tail = side.values["tail", 0].view(3, 3, -1)
    assert torch.equal(tail[2, :2], torch.zeros(2, 192))
    assert bool((tail[:2] != 0).all())


@pytest.mark.parametrize("tp", [1, 2])
def test_channels_and_gates_of_separate_linears(tp: int) -> None:
    """Each has a group, whose values are those of a module of the model."""
    passes = with_delta_apart(decode_pipeline(tp, 2, 4))
    case = prepare(tiny("qwen3.5", full_attention_interval=2), passes, BATCH)
    (case_step,) = case.steps
    groups = {group.key: group for group in case_step.step.groups}
    for name, columns in (("projected", 192), ("z", 96)):
        assert groups[name, 2].columns == columns
        assert (
            relative_error(
                *(side.values[name, 2] for side in (case_step.module, case_step.step.eager))
            )
            < TOLERANCE
        )


def test_linears_that_are_not_fused_are_refused() -> None:
    passes = [current for current in decode_pipeline(1, 2, 4) if current.name != "fuse-delta"]
    with pytest.raises(UnsupportedError, match="add fuse-delta to the pipeline"):
        prepare(tiny("qwen3.5"), passes, BATCH)
