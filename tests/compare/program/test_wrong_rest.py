"""For mistakes from attention to the token, the comparison names group and layer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.compare.program import wrong
from tests.compare.program.mistakes import (
    as_often_as_ranks,
    counting_empty,
    eps,
    equal_weights,
    fewer_columns,
    halves_swapped,
    in_base_two,
    last_of_equals,
    normed_with,
    one_row_off,
    one_token_twice,
    other_residual,
    overwritten,
    plus_residual,
    ranks_swapped,
    site,
    spanned,
    without_maximum,
    without_the_new,
)
from tests.compare.program.wrong import (
    Wrong,
    anywhere,
    functions,
    memory,
    on_rank,
    operands,
    runs_with,
)
from tpcompile.vm.groups import (
    AllReduce,
    Argmax,
    AttentionReduce,
    Embed,
    LinearTerms,
    NormGateUpSwiglu,
    NormLmHead,
    PartialAttention,
    attention,
    mlp,
)
from tpcompile.vm.groups.arithmetic import swiglu
from tpcompile.vm.groups.residual import Site
from tpcompile.vm.program.instruction import NONE, Range

ATTENTION, MLP = site(Site.ATTENTION), site(Site.MLP)

WRONG = [
    # attention
    Wrong(
        "another KV head",
        "partial_lse",
        wrong.instructions(
            PartialAttention,
            lambda instruction: replace(instruction, kv_head=1 - instruction.kv_head),
        ),
        tp=1,
    ),
    Wrong(
        "heads of another KV head",
        "partial_lse",
        wrong.instructions(
            PartialAttention, lambda instruction: replace(instruction, heads=Range(3, 6))
        ),
        tp=1,
        problem="reported with different bits",
    ),
    Wrong("scale missing", "partial_lse", operands(PartialAttention, scale=1.0)),
    Wrong(
        "maximum lost",
        "partial_lse",
        functions(
            PartialAttention,
            anywhere,
            (attention, "attend_span", spanned(without_maximum)),
        ),
    ),
    Wrong(
        "log-sum-exp in base 2",
        "partial_lse",
        functions(
            PartialAttention,
            anywhere,
            (attention, "attend_span", spanned(in_base_two)),
        ),
    ),
    Wrong(
        "last span without the new token",
        "partial_lse",
        functions(PartialAttention, anywhere, (attention, "span_of", without_the_new)),
    ),
    Wrong(
        "a token in two spans",
        "partial_lse",
        functions(PartialAttention, anywhere, (attention, "span_of", one_token_twice)),
    ),
    Wrong(
        "empty span counted",
        "partial_lse",
        wrong.instructions(PartialAttention, counting_empty),
    ),
    Wrong(
        "spans merged without their weights",
        "attention",
        functions(AttentionReduce, anywhere, (attention, "merge", equal_weights)),
    ),
    Wrong(
        "only the last span counts",
        "attention",
        functions(AttentionReduce, anywhere, (attention, "merge", overwritten)),
    ),
    # the residual
    Wrong(
        "columns of another rank",
        "attention_residual",
        wrong.weights("l1_o_proj_weight", ranks_swapped),
    ),
    Wrong(
        "residual twice",
        "attention_residual",
        wrong.instructions(
            LinearTerms,
            plus_residual(1.0),
            lambda instruction: ATTENTION(instruction) and instruction.rank == 0,
        ),
    ),
    Wrong(
        "residual on every rank",
        "mlp_residual",
        wrong.instructions(LinearTerms, plus_residual(1.0), MLP),
    ),
    Wrong(
        "residual not added", "attention_residual", runs_with(AllReduce, ATTENTION, residual=NONE)
    ),
    Wrong(
        "bias on every rank",
        "attention_residual",
        wrong.weights("l1_o_proj_bias", as_often_as_ranks),
        model="qwen3 with biases",
    ),
    Wrong("a rank left out of the sum", "mlp_residual", runs_with(AllReduce, MLP, ranks=2)),
    Wrong(
        "remaining columns dropped",
        "mlp_residual",
        wrong.instructions(LinearTerms, fewer_columns, MLP),
    ),
    # the second half of a layer
    Wrong(
        "norm of the old residual",
        "mlp_norm",
        operands(NormGateUpSwiglu, normed=other_residual),
    ),
    Wrong(
        "norm of the other half",
        "mlp_norm",
        operands(NormGateUpSwiglu, normed=normed_with("l1_input_layernorm_weight")),
    ),
    Wrong(
        "gate and up swapped",
        "swiglu",
        functions(NormGateUpSwiglu, anywhere, (mlp, "swiglu", lambda gate, up: swiglu(up, gate))),
    ),
    Wrong(
        "halves of the weight swapped",
        "swiglu",
        wrong.weights("l1_gate_up_proj_weight", halves_swapped),
    ),
    Wrong(
        "down columns of another rank",
        "mlp_residual",
        wrong.weights("l1_down_proj_weight", ranks_swapped),
    ),
    # the end of the step
    Wrong(
        "rows of the table counted from another token",
        "embedding",
        operands(Embed, on_rank(1), first=0),
    ),
    Wrong(
        "wrong eps in the final norm",
        "final_norm",
        operands(NormLmHead, normed=eps(1e-5)),
    ),
    Wrong("rows of the head shifted by one", "logits", memory(NormLmHead, anywhere, one_row_off)),
    Wrong(
        "vocabulary counted from another token",
        "token",
        operands(NormLmHead, lambda instruction: instruction.rank > 0, first=0),
    ),
    Wrong("maxima of one rank only", "token", runs_with(Argmax, ranks=1)),
    Wrong(
        "ties to the highest id",
        "token",
        memory(Argmax, anywhere, last_of_equals),
        model="qwen3 with a tie",
    ),
]


@pytest.mark.parametrize("mistake", WRONG, ids=wrong.names(WRONG))
def test_a_mistake_is_found_where_it_is(mistake: Wrong) -> None:
    wrong.assert_found(mistake)


def test_without_a_mistake_all_is_well() -> None:
    """Without a mistake the comparison passes, so it detects only the mistakes above."""
    wrong.assert_well(WRONG)
