"""Division of a step: programs compute sequences with few new tokens, and modules all others.

The choice depends on the number of new tokens of a sequence alone. So the bits of a token do not
depend on the other sequences of the step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TypeVar

import torch

from tpcompile.runtime.ranks.step import MOST_ROWS, Step

_Item = TypeVar("_Item")
_PER_TOKEN = ("input_ids", "positions", "slots")
_PER_SEQUENCE = ("tables", "lengths", "read", "write")


@dataclass(frozen=True)
class Part:
    """Sequences of a step, which a program or modules compute."""

    step: Step
    by_program: bool
    places: Sequence[int] | None = None
    """The places of its results among those of the whole step; None if it is the whole step."""


def parts_of(step: Step, most: int) -> list[Part]:
    """Divide a step: programs compute guesses, and sequences of at most `most` new tokens.

    Modules run whole steps that use no KV cache, or that request no logits or the choices of
    routers. The parts run in their order.
    """
    rows, starts = step.inputs["logit_rows"].tolist(), step.inputs["starts"].tolist()
    if step.routing is not None or "tables" not in step.inputs or not rows:
        return [Part(step, by_program=False)]
    counts = [end - first for first, end in pairwise(starts)]
    if step.rows or max(counts) == min(counts) == 1:
        return [Part(step, by_program=True)]
    few = [number for number, count in enumerate(counts) if 0 < count <= most]
    many = [number for number, count in enumerate(counts) if count > most]
    if not few:
        return [Part(step, by_program=False)]
    groups = groups_of_rows(few, counts.__getitem__)
    if groups == [[*range(len(counts))]]:
        return [Part(replace(step, rows=True), by_program=True)]
    owners = [bisect_right(starts, row) - 1 for row in rows]
    first, *later_parts = [
        *([_part(step, many, owners, by_program=False)] if many else []),
        *(_part(step, group, owners, by_program=True) for group in groups),
    ]
    return [first, *(replace(part, step=replace(part.step, copies=())) for part in later_parts)]


def groups_of_rows(items: Iterable[_Item], rows: Callable[[_Item], int]) -> list[list[_Item]]:
    """Group consecutive items, such as sequences, whose rows fit in a step together."""
    groups: list[list[_Item]] = []
    room = 0
    for item in items:
        if rows(item) > room:
            groups.append([])
            room = MOST_ROWS
        groups[-1].append(item)
        room -= rows(item)
    return groups


def _part(step: Step, numbers: Sequence[int], owners: Sequence[int], *, by_program: bool) -> Part:
    """Return the step of some sequences; `owners` are the sequences of the step's results."""
    starts, rows = step.inputs["starts"].tolist(), step.inputs["logit_rows"].tolist()
    spans = [range(starts[number], starts[number + 1]) for number in numbers]
    tokens = torch.tensor([token for span in spans for token in span])
    new_starts = [0, *accumulate(map(len, spans))]
    shifts = {
        number: begin - span.start
        for number, begin, span in zip(numbers, new_starts[:-1], spans, strict=True)
    }
    places = [place for place, owner in enumerate(owners) if owner in shifts]
    inputs = {
        **{name: step.inputs[name][tokens] for name in _PER_TOKEN},
        **{name: step.inputs[name][list(numbers)] for name in _PER_SEQUENCE if name in step.inputs},
        "starts": torch.tensor(new_starts),
        "logit_rows": torch.tensor(
            [rows[place] + shifts[owners[place]] for place in places], dtype=torch.long
        ),
    }
    return Part(replace(step, inputs=inputs, rows=by_program), by_program, places)


def joined(parts: Sequence[Part], results: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the results of a whole step, given those of its parts."""
    if parts[0].places is None:
        return results[0]
    places = torch.tensor([place for part in parts for place in part.places or ()])
    device = results[0].device
    together = torch.cat([result.to(device) for result in results])
    return together[places.argsort().to(device)]


def in_rows(step: Step) -> Step:
    """Return the step with the length and the blocks of each row instead of each sequence.

    If there is one state per sequence to read and to write, each row writes it, and all but the
    first read it.
    """
    if not step.rows:
        return step
    starts = step.inputs["starts"]
    counts, firsts = starts.diff(), starts[:-1]
    inputs = dict(step.inputs)
    for name in _PER_SEQUENCE:
        if name in inputs and len(inputs[name]) < starts[-1]:
            inputs[name] = inputs[name].repeat_interleave(counts, 0)
    later = starts[1:].repeat_interleave(counts) - 1 - torch.arange(int(starts[-1]))
    inputs["lengths"] = inputs["lengths"] - later
    if "read" in inputs:
        inputs["read"] = inputs["write"].roll(1).index_copy(0, firsts, inputs["read"][firsts])
    return replace(step, inputs=inputs)
