"""Routers choose as Hugging Face's, ties go to the lowest number, and experts are added once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

from tests.ir.ranks import Operand, operand, random, refused, run
from tests.models import relative_error
from tpcompile.ir.layout import FusedLayout, Layout, even_runs
from tpcompile.ir.ops import EXPERTS, SPECS, TOP_EXPERTS
from tpcompile.ir.plan import EXPERT_AXIS
from tpcompile.ir.types import PARTIAL, REPLICATE

aten = torch.ops.aten
TOKENS, HIDDEN, COUNT, CHOSEN, FEATURES = 7, 16, 6, 3, 5
SPLIT = Layout("expert_ffn", FEATURES, 1, even_runs(FEATURES, 2))
WHOLE = Layout(EXPERT_AXIS, COUNT, 1, even_runs(COUNT, 2))


def config(**changes: Any) -> Any:
    sizes = {
        "hidden_size": HIDDEN,
        "num_experts": COUNT,
        "num_experts_per_tok": CHOSEN,
        "moe_intermediate_size": FEATURES,
        "experts_implementation": "eager",
    }
    return Qwen3MoeConfig(**{**sizes, **changes})


def operands(tokens: int = TOKENS) -> list[Operand]:
    """Return tokens, scores, numbers and the weights of experts."""
    logits = random(tokens, COUNT).whole
    scores, ids = TOP_EXPERTS(logits, CHOSEN, True)
    return [
        random(tokens, HIDDEN, symbols=["T"], seed=1),
        operand(scores, ["T"]),
        operand(ids, ["T"]),
        random(COUNT, 2 * FEATURES, HIDDEN, seed=2),
        random(COUNT, HIDDEN, FEATURES, seed=3),
    ]


# The choice.


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_have_the_bits_of_hugging_face(dtype: torch.dtype, normalized: bool) -> None:
    """They are rounded last: rounding before they are normalised changes some of them."""
    router: Any = Qwen3MoeTopKRouter(config(norm_topk_prob=normalized)).to(dtype)
    with torch.no_grad():
        router.weight.copy_(random(COUNT, HIDDEN).whole)
        logits, scores, ids = router(random(200, HIDDEN, seed=1).whole.to(dtype))
    ours = TOP_EXPERTS(logits, CHOSEN, normalized)
    untied = (logits.sort(-1).values.diff() > 0).all(-1)
    assert untied.sum() > 100
    assert torch.equal(ours[0][untied], scores[untied])
    assert torch.equal(ours[1][untied], ids[untied])
    if normalized and dtype == torch.bfloat16:
        early = TOP_EXPERTS(logits, CHOSEN, False)[0]
        assert not torch.equal(early / early.sum(-1, keepdim=True), ours[0])


def test_ties_go_to_the_lowest_number() -> None:
    logits = torch.tensor(
        [[1.0, 2.0, 2.0, 1.0, 2.0, 0.0], [3.0] * 6, [0.0, 1.0, 1.0, 1.0, 1.0, 1.0]]
    )
    assert TOP_EXPERTS(logits, 3, False)[1].tolist() == [[1, 2, 4], [0, 1, 2], [1, 2, 3]]
    wide = torch.zeros(4, 512)
    assert TOP_EXPERTS(wide, 10, False)[1].tolist() == [[*range(10)]] * 4


def test_types_of_a_choice() -> None:
    run(TOP_EXPERTS, random(TOKENS, COUNT, symbols=["T"]), 3, True, ranks=2).assert_sound()


def test_logits_must_be_whole_and_the_choice_possible() -> None:
    logits = random(TOKENS, COUNT, symbols=["T"])
    halves = Layout("x", COUNT, 1, even_runs(COUNT, 2))
    for wrong in (logits.partial(), logits.sharded(1, halves)):
        refused("router", TOP_EXPERTS, wrong, 3, True)
    for count in (0, COUNT + 1):
        refused("router", TOP_EXPERTS, logits, count, True)


def test_ops_of_routers_take_whole_values_and_their_last_dimension() -> None:
    values = random(TOKENS, COUNT, symbols=["T"])
    run(aten.softmax.int, values, -1, torch.float32, ranks=2).assert_sound()
    run(aten.sum.dim_IntList, values, [-1], True, ranks=2).assert_sound()
    for target, arguments in (
        (aten.softmax.int, (0,)),
        (aten.topk.default, (2, 0)),
        (aten.sum.dim_IntList, ([0], True)),
        (aten.sum.dim_IntList, ([-1], False)),
        (aten.div_.Tensor, (random(COUNT),)),
    ):
        refused("router", target, values, *arguments)
    for target, arguments in ((aten.softmax.int, (-1,)), (aten.topk.default, (2,))):
        refused("router", target, values.partial(), *arguments)


# The experts.


@pytest.mark.parametrize("chosen", [1, 3, COUNT])
def test_numbers_are_those_of_hugging_face_s_loop(chosen: int) -> None:
    theirs: Any = Qwen3MoeExperts(config())
    x, _, _, gate_up, down = (value.whole for value in operands(40))
    scores, ids = TOP_EXPERTS(random(40, COUNT).whole, chosen, True)
    with torch.no_grad():
        theirs.gate_up_proj.copy_(gate_up)
        theirs.down_proj.copy_(down)
        expected = theirs(x, ids, scores)
        output = EXPERTS(x, scores, ids, gate_up, down)
        assert relative_error(output, expected) < 1e-6
        narrow = [value.bfloat16() for value in (x, scores, gate_up, down)]
        ours = EXPERTS(narrow[0], narrow[1], ids, *narrow[2:]).float()
        their = theirs.bfloat16()(narrow[0], ids, narrow[1]).float()
        exact = EXPERTS(
            *(value.float() for value in narrow[:2]), ids, *map(torch.Tensor.float, narrow[2:])
        )
        assert (ours - exact).abs().mean() <= 1.1 * (their - exact).abs().mean()


@pytest.mark.parametrize("layout", [SPLIT, WHOLE], ids=lambda layout: layout.axis)
def test_ranks_have_parts_of_experts_or_whole_ones(layout: Layout) -> None:
    x, scores, ids, gate_up, down = operands()
    if layout is SPLIT:
        weights = gate_up.sharded(1, FusedLayout((SPLIT, SPLIT))), down.sharded(2, SPLIT)
    else:
        weights = gate_up.sharded(0, WHOLE), down.sharded(0, WHOLE)
    outcome = run(EXPERTS, x, scores, ids, *weights, ranks=2)
    assert outcome.kind.placement == PARTIAL  # type: ignore[union-attr]
    outcome.assert_sound()
    whole = run(EXPERTS, *operands(), ranks=2)
    assert whole.kind.placement == REPLICATE  # type: ignore[union-attr]
    whole.assert_sound()


def _overlapping(axis: str, units: int) -> Layout:
    return Layout(axis, units, 1, (((0, units - 1),), ((1, units),)))


def test_weights_that_do_not_belong_together_are_refused() -> None:
    x, scores, ids, gate_up, down = operands()
    fused = FusedLayout((SPLIT, SPLIT))
    other = Layout("expert_ffn", FEATURES, 1, (((0, 1),), ((1, FEATURES),)))
    halves = Layout("rows", 2 * FEATURES, 1, even_runs(2 * FEATURES, 2))
    scattered = Layout(EXPERT_AXIS, COUNT, 1, (((0, 1), (3, 6)), ((1, 3),)))
    twice, more = _overlapping("expert_ffn", FEATURES), _overlapping(EXPERT_AXIS, COUNT)
    for first, second in (
        (gate_up.sharded(1, fused), down),
        (gate_up, down.sharded(2, SPLIT)),
        (gate_up.sharded(1, fused), down.sharded(2, other)),
        (gate_up.sharded(1, halves), down.sharded(2, SPLIT)),
        (gate_up.sharded(0, WHOLE), down),
        (gate_up.sharded(0, WHOLE), down.sharded(2, SPLIT)),
        (gate_up.sharded(0, scattered), down.sharded(0, scattered)),
        (gate_up.sharded(1, FusedLayout((twice, twice))), down.sharded(2, twice)),
        (gate_up.sharded(0, more), down.sharded(0, more)),
    ):
        refused("experts", EXPERTS, x, scores, ids, first, second)


def test_other_operands_are_refused() -> None:
    x, scores, ids, gate_up, down = operands()
    columns = Layout("x", HIDDEN, 1, even_runs(HIDDEN, 2))
    fewer = random(TOKENS, CHOSEN - 1, symbols=["T"])
    single = operand(gate_up.whole.bfloat16())
    for arguments in (
        (x.partial(), scores, ids, gate_up, down),
        (x.sharded(1, columns), scores, ids, gate_up, down),
        (x, scores.partial(), ids, gate_up, down),
        (x, fewer, ids, gate_up, down),
        (x, scores, scores, gate_up, down),
        (x, scores, ids, down, gate_up),
        (x, scores, ids, random(COUNT + 1, 2 * FEATURES, HIDDEN), down),
        (x, scores, ids, single, down),
        (x, scores, ids, gate_up, down, 1),
    ):
        refused("experts", EXPERTS, *arguments)


def test_the_cost_is_that_of_the_chosen_experts() -> None:
    """A token of six experts chooses three, so half of the bytes of a rank are expected."""
    kinds = [value.kind for value in operands()]
    spec = SPECS[EXPERTS]
    cost = spec.cost(kinds[0], kinds, 0)
    weights = COUNT * 3 * FEATURES * HIDDEN
    assert cost.flops == 2 * weights * CHOSEN // COUNT
    assert cost.memory_bytes == 4 * weights * CHOSEN // COUNT + 2 * 4 * HIDDEN
    part = [*kinds[:3], kinds[3].sharded(0, WHOLE), kinds[4].sharded(0, WHOLE)]
    assert spec.cost(kinds[0], part, 1).flops == cost.flops // 2
