"""For mistakes in computing queries, keys and values, the comparison names group and layer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.compare.program import wrong
from tests.compare.program.cases import QWEN2
from tests.compare.program.mistakes import (
    eps,
    layers_back,
    layers_swapped,
    norm_of_slices,
    normed_with,
    not_turned,
    numbers,
    one_slot_off,
    other_positions,
    other_theta,
    scrambled,
    sides_swapped,
    straight,
    swapped_back,
    turned_back,
)
from tests.compare.program.wrong import Wrong, functions, memory, of, operands, runs_with
from tpcompile.vm.groups import NormQkvRopeAppend as Append
from tpcompile.vm.groups import NormQkvRows as Rows
from tpcompile.vm.groups import qkv_operands as qkv
from tpcompile.vm.groups.qkv_operands import Part, QkvOperands
from tpcompile.vm.program.instruction import NONE

Q, K, V = of(Part.Q), of(Part.K), of(Part.V)

WRONG = [
    # the first half of a layer, up to the projections
    Wrong("wrong eps", "norm", operands(Append, normed=eps(1e-5))),
    Wrong(
        "norm of layer 0",
        "norm",
        operands(Append, normed=normed_with("l0_input_layernorm_weight")),
    ),
    Wrong(
        "wrong eps in blocks",
        "norm",
        operands(Rows, normed=eps(1e-5)),
        lowering="rows",
    ),
    Wrong(
        "weight split along its other dimension",
        "q",
        wrong.weights("l1_q_k_v_proj_weight", scrambled),
    ),
    Wrong(
        "keys from the rows of values",
        "k",
        runs_with(Append, K, first_row=lambda current: current.first_row + 32),
        tp=1,
    ),
    Wrong("bias of queries dropped", "q", operands(Append, Q, bias=NONE), model=QWEN2),
    Wrong("bias of keys dropped", "k", operands(Append, K, bias=NONE), model=QWEN2),
    Wrong("bias of values dropped", "v", operands(Append, V, bias=NONE), model=QWEN2),
    Wrong(
        "bias dropped in blocks", "v", operands(Rows, V, bias=NONE), model=QWEN2, lowering="rows"
    ),
    # heads
    Wrong(
        "norm over eight rows of a head",
        "q_normed",
        functions(Append, Q, (qkv, "rms_norm", norm_of_slices)),
    ),
    Wrong(
        "norm of queries dropped",
        "q_normed",
        operands(Append, Q, head_norm=NONE),
        problem="missing",
    ),
    Wrong(
        "norm of keys dropped", "k_normed", operands(Append, K, head_norm=NONE), problem="missing"
    ),
    Wrong(
        "scales of queries and keys swapped",
        "q_normed",
        operands(Append, Q, head_norm=lambda current: numbers("l1_k_norm_weight", current)),
    ),
    Wrong("wrong eps for heads", "k_normed", operands(Append, K, head_eps=1e-5)),
    Wrong(
        "scales of interleaved heads not permuted",
        "q_normed",
        wrong.weights("l1_q_norm_weight", straight),
        interleaved=True,
    ),
    Wrong(
        "a head completed by each of its blocks",
        "q_normed",
        wrong.instructions(Rows, lambda instruction: replace(instruction, blocks=1), Q),
        lowering="rows",
    ),
    # rotation
    Wrong(
        "keys rotated, queries not",
        "q_rotated",
        functions(Append, Q, (qkv, "rope", not_turned)),
    ),
    Wrong(
        "queries rotated, keys not",
        "k_rotated",
        functions(Append, K, (qkv, "rope", not_turned)),
    ),
    Wrong("rotated backwards", "q_rotated", functions(Append, Q, (qkv, "rope", turned_back))),
    Wrong("interleaved pairs, weights not", "q_rotated", operands(Append, Q, interleaved=True)),
    Wrong(
        "pairs half a head apart, weights not",
        "k_rotated",
        operands(Append, K, interleaved=False),
        interleaved=True,
    ),
    Wrong("position one too high", "q_rotated", memory(Append, Q, other_positions(1))),
    Wrong("position of keys one too low", "k_rotated", memory(Append, K, other_positions(-1))),
    Wrong("rotary tables of other frequencies", "q_rotated of layer 0", other_theta),
    # the cache
    Wrong(
        "keys appended one slot off",
        "k_cached",
        functions(Append, K, (QkvOperands, "_slots", one_slot_off)),
    ),
    Wrong(
        "values appended one slot off",
        "v_cached",
        functions(Append, V, (QkvOperands, "_slots", one_slot_off)),
    ),
    Wrong(
        "values written into keys",
        "k_cached",
        memory(Append, V, sides_swapped, swapped_back),
    ),
    Wrong(
        "keys written into another layer",
        "k_cached of layer 0",
        memory(Append, K, layers_swapped, layers_back),
    ),
]


@pytest.mark.parametrize("mistake", WRONG, ids=wrong.names(WRONG))
def test_a_mistake_is_found_where_it_is(mistake: Wrong) -> None:
    wrong.assert_found(mistake)


def test_without_a_mistake_all_is_well() -> None:
    """Without a mistake the comparison passes, so it detects only the mistakes above."""
    wrong.assert_well(WRONG)
