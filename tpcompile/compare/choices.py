"""The comparison of chosen experts with eager's. A changed choice is judged by its margin.

Choices are not continuous: an error of the logits within rounding may swap two experts whose logits
are close or equal. So every side follows eager's choices, and its own choices are compared apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from tpcompile.compare.rows import TOLERANCES, Row, token_margin
from tpcompile.ir.ops.experts import Routed, same_experts, scores_of, top_experts

_SHOWN = 6
"""The number of changed choices shown in text; JSON has all of them."""


@dataclass(frozen=True)
class Place:
    """The router and the tokens of some choices."""

    side: str
    layer: int
    tokens: Sequence[tuple[int, int]]
    """The sequence of each token, and its position there."""
    step: int = 0
    """The decode step, 0 for a prompt."""


@dataclass(frozen=True)
class ChangedChoice:
    """A token for which a side has chosen other experts than eager."""

    side: str
    step: int
    layer: int
    sequence: int
    token: int
    eager: tuple[int, ...]
    """The experts that eager has chosen and the side has not."""
    chosen: tuple[int, ...]
    """The experts that the side has chosen and eager has not."""
    margin: float
    """The largest difference between eager's logits of these experts."""
    ulps: float
    """The same in units in the last place of the largest of these logits."""
    limit: float
    """The largest margin that the error of the logits explains."""

    @property
    def ok(self) -> bool:
        """Whether the error of the logits explains the choice."""
        return self.margin <= self.limit

    @property
    def text(self) -> str:
        """The choice in words."""
        eager, chosen = (", ".join(map(str, ids)) for ids in (self.eager, self.chosen))
        where = f"layer {self.layer}, sequence {self.sequence}, token {self.token}"
        margin = f"margin {self.margin:.1e} ({self.ulps:.3g} ulp), limit {self.limit:.1e}"
        return f"{where}: experts {chosen} instead of {eager}, {margin}"


@dataclass(frozen=True)
class Choices:
    """The choices of one router on one side, compared with eager's."""

    place: Place
    changed: tuple[ChangedChoice, ...]
    magnitude: float
    """The largest magnitude of eager's logits."""
    limit: float
    """The largest margin that the error of the logits explains."""
    wrong_rows: tuple[int, ...] = ()
    """The rows of `place.tokens` with a wrong choice, or with a margin beyond the limit."""
    problem: str = ""
    """A choice that does not follow from the side's own logits, or ranks that differ; or empty."""
    score_error: float = 0.0
    """The largest relative distance of a score from that of the side's own logits."""
    score_limit: float = 0.0
    """The largest one that rounding explains."""
    beside_fp32: bool = False

    @property
    def worst(self) -> ChangedChoice | None:
        """The changed choice with the largest margin."""
        return max(self.changed, key=lambda choice: choice.margin, default=None)

    @property
    def score_problem(self) -> str:
        """The scores that do not follow from the side's own logits, or an empty string."""
        if self.score_error <= self.score_limit:
            return ""
        return (
            f"scores are off by {self.score_error:.1e} from those of the side's own logits, "
            f"of which rounding explains {self.score_limit:.1e}"
        )

    def score_row(self, row: Row, tolerance: float | None) -> Row:
        """Return the row of the scores, given the result of their comparison with eager's.

        Without a tolerance, scores are judged by the side's own logits, which have a row of their
        own: the error of a score is that of the logits, amplified.
        """
        problem = row.problem or self.score_problem
        if tolerance is not None:
            return replace(row, problem=problem, ok=row.ok and not problem)
        error, limit = self.score_error, self.score_limit
        return replace(row, problem=problem, ok=not problem, error=error, limit=limit)

    def row(self, name: str, source: str) -> Row:
        """Return the result as a row, whose error is the largest margin."""
        worst = self.worst
        margin = worst.margin if worst else 0.0
        problem = self.problem or (worst.text if worst and not worst.ok else "")
        error, limit = margin / self.magnitude, self.limit / self.magnitude
        layer, beside = self.place.layer, self.beside_fp32
        return Row(name, source, layer, margin, error, not problem, problem, error, limit, beside)


def compare_choices(
    place: Place,
    eager: Routed,
    by_rank: Sequence[Routed],
    exact: torch.Tensor | None,
    tolerance: float | None = None,
    *,
    by_topk: bool = False,
) -> Choices:
    """Compare a router's choices, one for each rank, with eager's.

    `exact` are the logits in fp32. Eager's may equal them by chance, and the side's may still be
    rounded once, which moves two of them by half a unit each. Choices and scores are also checked
    against the side's own logits, unless the side chooses `by_topk`, which promises no order of
    equal values.
    """
    logits = eager.logits.double()
    magnitude = float(logits.abs().max()) or 1.0
    beside = exact is not None and tolerance is None
    least = torch.finfo(eager.logits.dtype).eps if beside else 0.0
    limit = max(token_margin(eager.logits, exact, tolerance), least) * magnitude
    first = by_rank[0]
    problem, score_error, wrong = "", 0.0, set[int]()
    if any(not torch.equal(first.ids, other.ids) for other in by_rank[1:]):
        problem = "ranks choose different experts"
    elif not by_topk:
        problem, wrong = _choice_problem(place, first)
        score_error = 0.0 if problem else _score_error(first, _is_normalized(eager))
    changed = dict(_changed(place, eager, first, limit))
    wrong |= {row for row, choice in changed.items() if not choice.ok}
    score_limit = max(TOLERANCES[torch.float32], torch.finfo(first.scores.dtype).eps)
    return Choices(
        *(place, tuple(changed.values()), magnitude, limit, tuple(sorted(wrong)), problem),
        *(score_error, score_limit, beside),
    )


def _changed(
    place: Place, eager: Routed, routed: Routed, limit: float
) -> Iterator[tuple[int, ChangedChoice]]:
    """Yield the changed choices with their rows."""
    rows = (~same_experts(routed.ids, eager.ids)).nonzero()[:, 0].tolist()
    for row in rows:
        eager_ids, side_ids = set(eager.ids[row].tolist()), set(routed.ids[row].tolist())
        eager_only, side_only = sorted(eager_ids - side_ids), sorted(side_ids - eager_ids)
        logits = eager.logits[row].double()
        known = [expert for expert in side_only if 0 <= expert < len(logits)]
        margin = ulps = math.inf
        if side_only and known == side_only:
            margin = float(logits[eager_only].max() - logits[side_only].min())
            largest = float(logits[eager_only + side_only].abs().max())
            ulps = margin / _ulp(largest, eager.logits.dtype)
        sequence, token = place.tokens[row]
        yield (
            row,
            ChangedChoice(
                *(place.side, place.step, place.layer, sequence, token),
                *(tuple(eager_only), tuple(side_only), margin, ulps, limit),
            ),
        )


def _ulp(value: float, dtype: torch.dtype) -> float:
    """Return the distance between a number and the next one in a dtype."""
    info = torch.finfo(dtype)
    return math.ldexp(info.eps, math.frexp(max(value, info.tiny))[1] - 1)


def _choice_problem(place: Place, routed: Routed) -> tuple[str, set[int]]:
    """Return the first choice that is not the largest of its own logits, and the rows of all."""
    _, wanted = top_experts(routed.logits, routed.ids.shape[-1], False)
    wrong = (~same_experts(routed.ids, wanted)).nonzero()[:, 0].tolist()
    if not wrong:
        return "", set()
    chosen, expected = (sorted(ids[wrong[0]].tolist()) for ids in (routed.ids, wanted))
    return (
        f"{_position(place, wrong[0])}: experts {chosen}, expected {expected}, "
        "the largest of the side's own logits",
        set(wrong),
    )


def _score_error(routed: Routed, normalized: bool) -> float:
    """Return the largest relative distance of a score from that of the side's own logits."""
    wanted = scores_of(routed.logits, routed.ids, normalized).double()
    least = torch.finfo(routed.scores.dtype).smallest_normal
    return float(((routed.scores.double() - wanted).abs() / wanted.clamp(min=least)).max())


def _is_normalized(eager: Routed) -> bool:
    """Return whether eager's scores add up to 1, as far as they tell."""
    errors = [_score_error(eager, normalized) for normalized in (False, True)]
    return errors[1] < errors[0]


def _position(place: Place, row: int) -> str:
    sequence, token = place.tokens[row]
    return f"layer {place.layer}, sequence {sequence}, token {token}"


def choices_text(all_choices: Sequence[Choices]) -> str:
    """Return the number of changed choices and the largest ones as text, one per line."""
    changed = sorted(
        (choice for choices in all_choices for choice in choices.changed),
        key=lambda choice: -choice.margin,
    )
    compared = sum(len(choices.place.tokens) for choices in all_choices)
    if not changed:
        return f"no changed choices of {compared}\n"
    worst, beyond = changed[0], sum(not choice.ok for choice in changed)
    lines = [
        f"{len(changed)} changed choices of {compared} (largest margin {worst.margin:.1e}, "
        f"{worst.ulps:.3g} ulp), {beyond} beyond the error of the logits"
    ]
    lines += [f"  {_on(choice)}{choice.text}" for choice in changed[:_SHOWN]]
    if len(changed) > _SHOWN:
        lines.append(f"  … and {len(changed) - _SHOWN} with smaller margins")
    return "\n".join([*lines, "all values below are those with eager's choices"]) + "\n"


def _on(choice: ChangedChoice) -> str:
    return f"{choice.side} step {choice.step}, " if choice.step else f"{choice.side}, "
