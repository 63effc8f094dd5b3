"""For mistakes in linear and in gated attention, the comparison names group and layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.compare.program import wrong
from tests.compare.program.cases import HYBRID
from tests.compare.program.mistakes import (
    Tensors,
    eps,
    equal_weights,
    halves_swapped,
    ranks_swapped,
)
from tests.compare.program.wrong import Wrong, anywhere, functions, memory, of, on_rank, operands
from tpcompile.vm.groups import (
    AttentionReduce,
    DeltaStep,
    NormQkvRopeAppend,
    NormRows,
    attention,
    delta,
)
from tpcompile.vm.groups.qkv_operands import Part
from tpcompile.vm.program.accesses import Interval


def taps_reversed(held: Tensors) -> Tensors:
    return [weight.flip(-1) for weight in held]


def one_tap(row: int) -> Callable[[Tensors], Tensors]:
    """Change a tap of one channel on rank 1."""

    def change(held: Tensors) -> Tensors:
        wrong = held[1].clone()
        wrong[row, 0, 2] += 0.1
        return [held[0], wrong]

    return change


def more(offset: float) -> Callable[[Tensors], Tensors]:
    return lambda held: [weight + offset for weight in held]


def shares_negated(tensors: Tensors, shared: Any) -> None:
    gates = tensors[shared.gates].clone()
    gates[:, : shared.v_heads] *= -1
    tensors[shared.gates] = gates


def states_of_others(tensors: Tensors, shared: Any) -> None:
    tensors[shared.read] = tensors[shared.read].roll(1)


def as_new(tensors: Tensors, shared: Any) -> None:
    tensors[shared.lengths] = torch.ones_like(tensors[shared.lengths])


def as_old(tensors: Tensors, shared: Any) -> None:
    tensors[shared.lengths] = tensors[shared.lengths] + 1


def in_layer(number: int, mistakes: list[Wrong]) -> list[Wrong]:
    """Return the mistakes of the hybrid on two ranks, whose groups are in a layer."""
    return [
        replace(mistake, group=f"{mistake.group} of layer {number}", model=HYBRID, tp=2)
        for mistake in mistakes
    ]


LINEAR = [
    Wrong(
        "inputs of another rank",
        "projected",
        wrong.weights("l2_in_proj_qkv_z_weight", ranks_swapped),
    ),
    Wrong(
        "gates in another order", "gates", wrong.weights("l2_in_proj_b_a_weight", halves_swapped)
    ),
    # the convolution
    Wrong("taps reversed", "q_conv", wrong.weights("l2_conv1d_weight", taps_reversed)),
    Wrong("one tap of a query", "q_conv", wrong.weights("l2_conv1d_weight", one_tap(0))),
    Wrong("one tap of a key", "k_conv", wrong.weights("l2_conv1d_weight", one_tap(32))),
    Wrong("one tap of a value", "v_conv", wrong.weights("l2_conv1d_weight", one_tap(64))),
    # the gates
    Wrong("a slower decay", "decay", wrong.weights("l2_linear_attn_A_log", more(-0.5))),
    Wrong("no offset of the decay", "decay", wrong.weights("l2_linear_attn_dt_bias", more(0.5))),
    Wrong(
        "decay from the shares",
        "decay",
        functions(DeltaStep, anywhere, (DeltaStep, "decay_columns", Interval("heads"))),
    ),
    Wrong("shares negated", "beta", memory(DeltaStep, anywhere, shares_negated)),
    # the states
    Wrong("states of other sequences", "tail", memory(DeltaStep, anywhere, states_of_others)),
    Wrong("old sequences begin again", "tail", memory(DeltaStep, anywhere, as_new)),
    Wrong(
        "a new sequence reads a state", "tail", memory(DeltaStep, anywhere, as_old), problem="NaN"
    ),
    Wrong(
        "keys not normalised",
        "state",
        functions(DeltaStep, anywhere, (delta, "_normalized", lambda head: head)),
    ),
    # the results
    Wrong(
        "results not normalised",
        "mixed",
        functions(DeltaStep, anywhere, (delta, "rms_norm", lambda x, weight, eps: x)),
    ),
    Wrong("another scale", "mixed", wrong.weights("l2_norm_weight", more(0.1))),
    Wrong(
        "results of another rank",
        "attention_residual",
        wrong.weights("l2_out_proj_weight", ranks_swapped),
    ),
]
GATED = [
    Wrong(
        "gates of another rank",
        "attention_gate",
        wrong.weights("l3_q_proj_1_weight", ranks_swapped),
    ),
    Wrong(
        "wrong eps for heads", "q_normed", operands(NormQkvRopeAppend, of(Part.Q), head_eps=1e-3)
    ),
    Wrong(
        "spans merged without their weights",
        "ungated",
        functions(AttentionReduce, anywhere, (attention, "merge", equal_weights)),
    ),
    Wrong(
        "gates without a sigmoid",
        "attention",
        functions(AttentionReduce, anywhere, (attention, "sigmoid", lambda gate: gate)),
    ),
]
ONE_NORM = Wrong(
    "the norm of one gate",
    "norm",
    operands(NormRows, on_rank(1), normed=eps(1e-3)),
    problem="reported with different bits",
)
WRONG = [*in_layer(2, LINEAR), *in_layer(3, GATED), *in_layer(1, [ONE_NORM])]


@pytest.mark.parametrize("mistake", WRONG, ids=wrong.names(WRONG))
def test_a_mistake_is_found_where_it_is(mistake: Wrong) -> None:
    wrong.assert_found(mistake)


def test_without_a_mistake_all_is_well() -> None:
    """Without a mistake the comparison passes, so it detects only the mistakes above."""
    wrong.assert_well(WRONG)


def test_one_wrong_tap_is_named() -> None:
    """The value head of the channel is named, and so are the instructions that compute it.

    The last sequence has no earlier token for this tap.
    """
    case, lowered = wrong.weights("l2_conv1d_weight", one_tap(64 + 16))(WRONG[0].right)
    first: Any = case.against(wrong.in_order(lowered)).first_divergence
    assert (first.node, first.layer, first.sequences) == ("v_conv", 2, (0, 1))
    assert (first.heads, first.rows, first.ranks) == ((4,), (0, 1), (1,))
    assert all(source.startswith("delta_step layer 1 rank 1 sequence=") for source in first.by)
