"""A changed choice is judged by its margin, and by the side's own logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tpcompile.compare.choices import Choices, Place, choices_text, compare_choices
from tpcompile.compare.comparison import Comparison
from tpcompile.ir.ops.experts import Routed, replayed, same_experts, top_experts

TOKENS = [(0, 4), (1, 0), (1, 1)]
LOGITS = torch.tensor([[1.0, 2.0, 3.0, 4.0], [4.0, 4.0, 0.5, 4.0], [0.0, -8.0, -2.0, -1.0]])
PLACE = Place("program", 3, TOKENS, 2)


def routed(logits: torch.Tensor, normalized: bool = True) -> Routed:
    return Routed(logits, *top_experts(logits, 2, normalized))


def judged(side: Routed, eager: Routed | None = None, **options: object) -> Choices:
    theirs = routed(LOGITS) if eager is None else eager
    settings = {"exact": None, "tolerance": 0.1, **options}
    return compare_choices(PLACE, theirs, [side], **settings)  # type: ignore[arg-type]


def test_the_same_experts_in_another_order() -> None:
    side = routed(LOGITS)
    choices = judged(Routed(side.logits, side.scores.flip(-1), side.ids.flip(-1)))
    assert (choices.changed, choices.problem, choices.score_problem) == ((), "", "")
    assert choices.row("choice", "program").ok


def test_equal_logits_have_no_margin() -> None:
    eager = routed(LOGITS)
    eager = eager._replace(
        ids=eager.ids.index_put((torch.tensor(1), torch.tensor(1)), torch.tensor(3))
    )
    (changed,) = judged(routed(LOGITS), eager).changed
    assert (changed.eager, changed.chosen) == ((3,), (1,))
    assert (changed.margin, changed.ulps, changed.ok) == (0.0, 0.0, True)
    assert (changed.sequence, changed.token, changed.layer, changed.step) == (1, 0, 3, 2)


@pytest.mark.parametrize(("tolerance", "ok"), [(0.3, True), (0.2, False)])
def test_a_margin_is_compared_with_the_largest_logit(tolerance: float, ok: bool) -> None:
    """Token 2 prefers expert 2 to expert 3 by one, of a largest logit of 8 in all."""
    other = LOGITS.clone()
    other[2] = torch.tensor([0.0, -8.0, -1.0, -2.0])
    choices = judged(routed(other), tolerance=tolerance / 2)
    (changed,) = choices.changed
    assert (changed.margin, changed.ok, choices.problem) == (1.0, ok, "")
    assert changed.ulps == 1.0 / (2 * torch.finfo(torch.float32).eps)  # of numbers from 2 to 4
    row = choices.row("choice", "program")
    assert (row.ok, row.rel, row.max_abs, row.layer) == (ok, 1 / 8, 1.0, 3)
    assert ("experts 2 instead of 3" in row.problem) != ok


def test_beside_fp32_the_limit_is_the_error_of_the_logits() -> None:
    eager, near = routed(LOGITS.bfloat16()), LOGITS.bfloat16()
    near[0, 1], near[0, 2] = near[0, 2], near[0, 1]
    exact = LOGITS + 0.25
    choices = judged(routed(near), eager, exact=exact, tolerance=None)
    assert choices.limit == pytest.approx(4 * 0.25)
    assert [(choice.margin, choice.ok) for choice in choices.changed] == [(1.0, True)]
    assert choices.row("choice", "").beside_fp32
    assert not judged(routed(near), eager, exact=exact - 0.05, tolerance=None).changed[0].ok


def test_a_choice_that_its_logits_do_not_explain() -> None:
    """The experts are 1 apart in both logits, which a large tolerance would allow."""
    side = routed(LOGITS)
    wrong = side._replace(ids=torch.tensor([[2, 1], *side.ids[1:].tolist()]))
    choices = judged(wrong, tolerance=1.0)
    assert choices.problem == (
        "layer 3, sequence 0, token 4: experts [1, 2], expected [2, 3], the largest of the side's "
        "own logits"
    )
    assert not choices.row("choice", "").ok
    assert judged(wrong, tolerance=1.0, by_topk=True).row("choice", "").ok


@pytest.mark.parametrize("ids", [[3, 3], [3, 99], [-1, 3]])
def test_numbers_that_are_no_choice(ids: list[int]) -> None:
    side = routed(LOGITS)
    choices = judged(side._replace(ids=torch.tensor([ids, *side.ids[1:].tolist()])), tolerance=1.0)
    (changed,) = choices.changed
    assert (changed.margin, changed.ok) == (math.inf, False)
    assert choices.problem


SCORES: dict[str, Callable[[Routed], torch.Tensor]] = {
    "not normalised": lambda side: top_experts(side.logits, 2, False)[0],
    "of other experts": lambda side: side.scores.flip(-1),
    "off by two roundings": lambda side: side.scores * (1 + 2**-6),
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_follow_from_the_side_s_own_logits(name: str, dtype: torch.dtype) -> None:
    side = routed((LOGITS + 0.01 * LOGITS.flip(-1)).to(dtype))
    eager = routed(LOGITS.to(dtype))
    assert judged(side, eager).score_problem == ""
    choices = judged(side._replace(scores=SCORES[name](side)), eager)
    assert choices.score_problem.startswith("scores are off by")
    assert choices.problem == ""


@pytest.mark.parametrize("normalized", [False, True])
def test_eager_says_whether_scores_are_normalised(normalized: bool) -> None:
    eager = routed(LOGITS, normalized)
    assert judged(routed(LOGITS, normalized), eager).score_problem == ""
    assert judged(routed(LOGITS, not normalized), eager).score_problem


def test_ranks_that_choose_differently() -> None:
    side, other = routed(LOGITS), routed(LOGITS.flip(-1))
    choices = compare_choices(PLACE, side, [side, other], None)
    assert choices.row("choice", "").problem == "ranks choose different experts"


def test_given_experts_keep_own_scores_in_their_order() -> None:
    """Only a token that has chosen others gets scores from its logits."""
    side = routed(LOGITS)
    marked = side._replace(scores=side.scores + 1)
    experts = torch.tensor([[2, 3], [3, 0], [3, 0]])
    assert same_experts(side.ids, experts).tolist() == [True, False, True]
    scores = replayed(marked, experts, True)
    assert torch.equal(scores[0], marked.scores[0].flip(0))
    assert scores[1].tolist() == [0.5, 0.5]
    assert torch.equal(scores[2], marked.scores[2].flip(0))


def _many() -> Choices:
    other = torch.stack([LOGITS[2].flip(0)] * 3)
    return judged(routed(other), tolerance=0.05)


def test_text_names_the_largest_margins_first() -> None:
    text = choices_text([_many(), judged(routed(LOGITS))])
    first, second, *_, last = text.splitlines()
    assert first.startswith("2 changed choices of 6 (largest margin 2.0e+00, ")
    assert first.endswith("), 1 beyond the error of the logits")
    assert second.startswith("  program step 2, layer 3, sequence 0, token 4: experts 0 instead")
    assert last == "all values below are those with eager's choices"
    assert choices_text([judged(routed(LOGITS))]) == "no changed choices of 3\n"


def test_json_has_every_changed_choice() -> None:
    side = routed(LOGITS)
    invalid = side._replace(ids=torch.tensor([[3, 99], *side.ids[1:].tolist()]))
    choices = Comparison((), True, {}, choices=(judged(invalid),)).to_json()["choices"]
    assert choices["compared"] == 3
    (choice,) = choices["changed"]
    assert (choice["margin"], choice["ulps"], choice["ok"]) == (None, None, False)
    assert (choice["eager"], choice["chosen"], choice["side"], choice["step"]) == (
        (2,),
        (99,),
        "program",
        2,
    )
    assert Comparison((), True, {}).to_json()["choices"] is None


def test_a_row_of_runs_has_the_scores_too() -> None:
    choices = replace(judged(routed(LOGITS)), score_error=1.0)
    row = choices.row("scores", "")
    assert row.ok
    assert not choices.score_row(row, None).ok
    assert choices.score_row(row, None).error == 1.0
    assert choices.score_row(row, 2.0).problem == choices.score_problem
