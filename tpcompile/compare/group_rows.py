"""The comparison of a decode step's sides by group, with the positions of divergences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from tpcompile.compare.choices import Choices, Place, compare_choices
from tpcompile.compare.groups import Group, Key, Side
from tpcompile.compare.rows import Row, row_of, token_margin
from tpcompile.ir.ops.experts import Routed, replayed

TOKEN, LOGITS = ("token", None), ("logits", None)
ROUTER, CHOICE, SCORES = "router", "choice", "scores"
"""The groups of a mixture of experts: the logits, the chosen experts, and their scores."""
_SHOWN = 6
"""The number of list items shown in text; JSON has all of them."""


@dataclass(frozen=True)
class GroupRow(Row):
    """A compared group on one side, with the sequences, heads and rows that differ."""

    side: str = ""
    step: int = 1
    sequences: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    """Numbered within the whole model, not within a rank."""
    spans: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    """Start and stop of the rows of a head, or else of the weight that computes the value."""
    ranks: tuple[int, ...] = ()
    by: tuple[str, ...] = ()
    """The sources of the values that differ."""

    @property
    def place(self) -> str:
        """The position of the divergence as text."""
        parts = [f"sequence{_several(self.sequences)}"] if self.sequences else []
        parts += [f"head{_several(self.heads)}"] if self.heads else []
        parts += [f"span{_several(self.spans)}"] if self.spans else []
        parts += [f"rows {self.rows[0]} to {self.rows[1]}"] if self.rows else []
        text = ", ".join(parts)
        return text + (f"; computed by {'; '.join(self.by[:2])}" if self.by else "")


@dataclass(frozen=True)
class Step:
    """The same step on all sides. `exact` is eager in fp32, if needed."""

    groups: tuple[Group, ...]
    eager: Side
    exact: Side | None = None
    normalized: Mapping[int, bool] = field(default_factory=dict)
    """Whether the scores of a layer's experts add up to 1, by layer."""
    tokens: tuple[int, ...] = ()
    """The position of each sequence's new token."""


def compare_sides(
    step: Step,
    sides: Sequence[Side],
    tolerance: float | None = None,
    number: int = 1,
    choices: Sequence[Choices] = (),
) -> Iterator[GroupRow]:
    """Compare each group on each side that has it with eager, in the order of the step.

    `choices` are the results of `side_choices` for all sides.
    """
    for group in step.groups:
        for side in (side for side in sides if group.key in side.values):
            chosen = next(
                (candidate for candidate in choices if _belongs_to(candidate, side, group)), None
            )
            row = _row(step, group, side, tolerance, number, chosen)
            yield row if row.ok else _placed(row, step, group, side, chosen)
    for side in (step.eager, *sides):
        for key, source in side.unknown.items():
            yield _stray(side, key, source, number)


def side_choices(
    step: Step, side: Side, tolerance: float | None = None, number: int = 1
) -> Iterator[Choices]:
    """Compare the choices of experts on a side with eager's."""
    for layer in step.normalized:
        exact = step.exact.values[ROUTER, layer] if step.exact else None
        place = Place(side.name, layer, [*enumerate(step.tokens)], number)
        sides = _routed(step.eager, layer), [_routed(side, layer)]
        yield compare_choices(place, *sides, exact, tolerance)


def _routed(side: Side, layer: int) -> Routed:
    logits, scores, ids = (side.values[name, layer] for name in (ROUTER, SCORES, CHOICE))
    return Routed(logits, scores, ids.long())


def _belongs_to(choices: Choices, side: Side, group: Group) -> bool:
    return (choices.place.side, choices.place.layer) == (side.name, group.layer)


def _row(
    step: Step,
    group: Group,
    side: Side,
    tolerance: float | None,
    number: int,
    choices: Choices | None,
) -> GroupRow:
    if group.key == TOKEN:
        row, problem = _token_row(step, side, tolerance)
    elif group.name == CHOICE and choices is not None:
        row = choices.row(group.name, side.name)
        problem = row.problem
    else:
        actual, expected, exact = _finite(step, group, side)
        row = row_of(group.name, side.name, actual, expected, tolerance, group.layer, exact=exact)
        if group.name == SCORES and choices is not None:
            row = choices.score_row(row, tolerance)
        problem = row.problem
    reported = side.problems.get(group.key, "")
    eager_problem = step.eager.problems.get(group.key, "")
    problem = reported or (eager_problem and f"in eager: {eager_problem}") or problem
    return _group_row(row, side, number, problem)


def _group_row(row: Row, side: Side, step: int, problem: str) -> GroupRow:
    layer = "" if row.layer is None else f" layer {row.layer}"
    values = vars(row) | {
        "source": f"{side.name}{layer} step {step}",
        "problem": problem,
        "ok": row.ok and not problem,
    }
    return GroupRow(**values, side=side.name, step=step)


def _finite(
    step: Step, group: Group, side: Side
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the values, with 0 where both sides are minus infinity, as for an empty span.

    Scores are those of the experts that eager has chosen.
    """
    actual, expected = side.values[group.key], step.eager.values[group.key]
    if group.name == SCORES and group.layer is not None:
        experts = step.eager.values[CHOICE, group.layer]
        actual = replayed(_routed(side, group.layer), experts, step.normalized[group.layer])
    exact = step.exact.values[group.key] if step.exact else None
    if actual.shape != expected.shape:
        return actual, expected, exact
    empty = (actual == -torch.inf) & (expected == -torch.inf)
    filled = (actual.masked_fill(empty, 0), expected.masked_fill(empty, 0))
    return *filled, None if exact is None else exact.masked_fill(empty, 0)


def _token_row(step: Step, side: Side, tolerance: float | None) -> tuple[Row, str]:
    """Compare eager's logits of the chosen tokens with its highest logits.

    Tokens that eager cannot tell apart are equally good. Among the side's own highest logits, the
    chosen token must be the one with the lowest id.
    """
    logits = step.eager.values[LOGITS].float()
    exact = step.exact.values[LOGITS].float() if step.exact else None
    chosen, side_logits = side.values[TOKEN].long(), side.values[LOGITS]
    known = (chosen >= 0) & (chosen < logits.shape[1])
    chosen_logits = logits.gather(1, chosen.where(known, 0))
    margin = token_margin(logits, exact, tolerance)
    row = row_of(TOKEN[0], side.name, chosen_logits, logits.amax(1, keepdim=True), margin)
    lowest = best_tokens(side_logits)
    if not bool(known.all()):
        return row, f"invalid tokens: {chosen[~known].tolist()}"
    for token, wanted in zip(chosen[:, 0].tolist(), lowest[:, 0].tolist(), strict=True):
        if token != wanted:
            return (
                row,
                f"token {token}, expected {wanted}, the first among the side's own highest logits",
            )
    return row, ""


def best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """Return the best token of each row, `[rows, 1]`. Among equal logits the lowest id wins."""
    ids = torch.arange(logits.shape[1]).expand(logits.shape)
    highest = logits == logits.amax(1, keepdim=True)
    return ids.where(highest, logits.shape[1]).amin(1, keepdim=True)


def _stray(side: Side, key: Key, source: str, step: int) -> GroupRow:
    """Return the row of a value that belongs to no group."""
    name, layer = key
    problem = f"no other side has it; reported by {source}"
    empty = torch.zeros(0)
    row = row_of(name, side.name, empty, empty, layer=layer)
    return _group_row(row, side, step, problem)


def _placed(
    row: GroupRow, step: Step, group: Group, side: Side, choices: Choices | None
) -> GroupRow:
    """Add the position of values beyond the limit or, if compared with fp32, of the worst ones."""
    if group.name == CHOICE and choices is not None:
        wrong = torch.zeros_like(side.values[group.key], dtype=torch.bool)
        wrong[list(choices.wrong_rows)] = True
    else:
        wrong = _wrong_elements(step, group, side, row)
    if not bool(wrong.any()):
        return row
    lines, columns = (sorted(set(indices.tolist())) for indices in wrong.nonzero().unbind(1))
    places = [column % group.width for column in columns] if group.head else columns
    part = group.width // group.spans
    rows = [place % part for place in places] if group.head else places
    sources = sorted(set(side.source_indices[group.key][wrong].tolist()))
    return replace(
        row,
        sequences=_once(map(group.sequence_of, lines)),
        heads=_once(column // group.width for column in columns) if group.head else (),
        spans=_once(place // part for place in places) if group.spans > 1 else (),
        rows=(min(rows), max(rows) + 1),
        ranks=tuple(_ranks(group, columns)),
        by=tuple(side.sources[number] for number in sources if number >= 0),
    )


def _once(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(numbers)))


def _wrong_elements(step: Step, group: Group, side: Side, row: GroupRow) -> torch.Tensor:
    if group.key == TOKEN:
        chosen = side.values[TOKEN]
        return (chosen != step.eager.values[TOKEN]) | (chosen != best_tokens(side.values[LOGITS]))
    actual, expected, exact = _finite(step, group, side)
    if actual.shape != expected.shape:
        return torch.zeros((0, 0), dtype=torch.bool)
    truth = exact if row.beside_fp32 and exact is not None else expected
    errors = (actual.double() - truth.double()).abs()
    invalid = ~errors.isfinite()
    most = float(errors[~invalid].max()) if bool((~invalid).any()) else 0.0
    largest = float(expected.abs().max()) or 1.0
    limit = most / 4 if row.beside_fp32 else row.limit * largest
    return invalid if bool(invalid.any()) else errors > limit


def _ranks(group: Group, columns: Sequence[int]) -> Iterator[int]:
    if group.layout is None:
        return
    wanted = set(columns)
    for rank in range(group.layout.ranks):
        if any(wanted.intersection(range(*interval)) for interval in group.intervals(rank)):
            yield rank


def _several(numbers: Sequence[int]) -> str:
    listed = ", ".join(map(str, numbers[:_SHOWN])) + (", …" if len(numbers) > _SHOWN else "")
    return f"s {listed}" if len(numbers) > 1 else f" {listed}"
