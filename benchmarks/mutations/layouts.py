"""Mistakes in layouts: the type and the recipes agree, and both are wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import fx

from benchmarks.mutations.draft import (
    Draft,
    UnfitError,
    layer_of,
    rank_of_some,
    relayout,
    segments_of,
    shard_of,
    with_parts,
)
from tpcompile.ir.layout import FusedLayout, Interval, Layout, even_runs
from tpcompile.ir.meta import parameter_of, set_parameter, value_type
from tpcompile.ir.ops import REDUCE_SCATTER
from tpcompile.ir.plan import plan_axis

_SUMMED = ("q_heads", "ffn")
_ANY = ("q_heads", "ffn", "vocab")


def shard_dim(draft: Draft) -> str:
    """Split a column-parallel weight (or the vocabulary) along its other dimension."""
    return _other_dim(draft, 0)


def shard_dim_of_rows(draft: Draft) -> str:
    """Split a row-parallel weight along its output features."""
    return _other_dim(draft, 1)


def _other_dim(draft: Draft, dim: int) -> str:
    matrices = [n for n in draft.split_parameters(dim) if value_type(n).dims == 2]
    node = draft.pick(matrices, "matrix")
    size = value_type(node).shape[1 - dim]
    assert isinstance(size, int)
    layout = plan_axis(segments_of(node)[0].axis, size, draft.tp, 1)
    set_parameter(node, parameter_of(node).sharded(1 - dim, layout))
    return f"%{node.name} split along dimension {1 - dim}"


def sides_differ(draft: Draft) -> str:
    """Give the weight of a contraction and the producer of its operand different layouts."""
    axis = draft.pick(_SUMMED, "axis")
    node = draft.pick(draft.split_parameters(axis=axis), f"parameter split by {axis}")
    old = part_of(node, axis)
    name, layout = draft.pick(
        [(name, new) for name, make in _OTHERS.items() for new in _valid(old, make(old))],
        "other layout",
    )
    relayout(node, axis, layout)
    return f"{axis} of %{node.name} {name}: {layout.parts} of {layout.grain}"


def parts_differ(draft: Draft) -> str:
    """Give two fused parts, which are combined element by element, different layouts."""
    node = draft.pick(_with_twins(draft), "fused parameter with two equal parts")
    parts = list(segments_of(node))
    place = draft.pick([i for i, part in enumerate(parts) if parts.count(part) > 1], "part")
    layouts = [new for make in _OTHERS.values() for new in _valid(parts[place], make(parts[place]))]
    parts[place] = draft.pick(layouts, "other layout")
    set_parameter(node, parameter_of(node).sharded(0, FusedLayout(tuple(parts))))
    return f"part {place} of %{node.name}: {parts[place].parts} of {parts[place].grain}"


def _with_twins(draft: Draft) -> list[fx.Node]:
    nodes = draft.split_parameters(dim=0)
    return [n for n in nodes if len(set(segments_of(n))) < len(segments_of(n))]


def moved_boundary(old: Layout) -> Iterator[Layout]:
    for rank in range(old.ranks - 1):
        (start, stop), (after, end) = old.parts[rank][0], old.parts[rank + 1][-1]
        for step in (-1, 1):
            parts = list(old.parts)
            parts[rank : rank + 2] = [((start, stop + step),), ((after + step, end),)]
            yield with_parts(old, parts)


def _shorter_first(old: Layout) -> Iterator[Layout]:
    lengths = [old.unit_count(rank) for rank in reversed(range(old.ranks))]
    stops = [sum(lengths[: rank + 1]) for rank in range(old.ranks)]
    yield with_parts(
        old, (((start, stop),) for start, stop in zip([0, *stops], stops, strict=False))
    )


def _ranks_swapped(old: Layout) -> Iterator[Layout]:
    yield with_parts(old, reversed(old.parts))


def _round_robin(old: Layout) -> Iterator[Layout]:
    dealt = [range(rank, old.units, old.ranks) for rank in range(old.ranks)]
    yield with_parts(old, (tuple((unit, unit + 1) for unit in units) for units in dealt))


def _even_elements(old: Layout) -> Iterator[Layout]:
    """Yield a split by elements instead of units, as from dividing the width by tp."""
    yield Layout(old.axis, old.size, 1, even_runs(old.size, old.ranks))


_OTHERS: dict[str, Callable[[Layout], Iterator[Layout]]] = {
    "with a boundary moved": moved_boundary,
    "with the shorter runs first": _shorter_first,
    "with ranks swapped": _ranks_swapped,
    "dealt one by one": _round_robin,
    "cut into even elements": _even_elements,
}


def _valid(old: Layout, layouts: Iterator[Layout]) -> list[Layout]:
    """Return the layouts that are valid by themselves, but differ from the other side's."""
    ranks = range(old.ranks)
    intervals = [merged(old.intervals(rank)) for rank in ranks]
    return [
        new
        for new in layouts
        if not new.refusal()
        and not new.overlap()
        and [merged(new.intervals(rank)) for rank in ranks] != intervals
    ]


def merged(intervals: tuple[Interval, ...]) -> list[int]:
    return [place for start, stop in intervals for place in range(start, stop)]


def gap(draft: Draft) -> str:
    """Shorten one rank's run by a unit, so that no rank has this unit."""

    def shorter(layout: Layout) -> Layout:
        rank = rank_of_some(draft, (layout.unit_count(r) > 1 for r in range(layout.ranks)))
        start, stop = layout.parts[rank][0]
        run = draft.pick([(start + 1, stop), (start, stop - 1)], "end")
        return with_parts(layout, with_run(layout, rank, run))

    return _resplit(draft, shorter, "a gap")


def overlap(draft: Draft) -> str:
    """Extend one rank's run by a unit into its neighbour's."""

    def longer(layout: Layout) -> Layout:
        rank = draft.dice.randrange(layout.ranks)
        start, stop = layout.parts[rank][0]
        runs = [(start - 1, stop), (start, stop + 1)]
        inside = [run for run in runs if run[0] >= 0 and run[1] <= layout.units]
        return with_parts(layout, with_run(layout, rank, draft.pick(inside, "end")))

    return _resplit(draft, longer, "an overlap")


def with_run(layout: Layout, rank: int, run: Interval) -> list[tuple[Interval, ...]]:
    return [(run,) if r == rank else part for r, part in enumerate(layout.parts)]


def _resplit(draft: Draft, change: Callable[[Layout], Layout], description: str) -> str:
    """Change the split of one parameter, or of all parameters of a layer with the axis."""
    axis = draft.pick(_ANY, "axis")
    node = draft.pick(draft.split_parameters(axis=axis), f"parameter split by {axis}")
    layout = change(part_of(node, axis))
    together = draft.dice.random() < 0.5
    nodes = alike(draft, axis, node) if together else [node]
    for member in nodes:
        relayout(member, axis, layout)
    names = "all of its layer" if together else f"%{node.name}"
    return f"{axis} of {names} ({node.name}) with {description}: {layout.parts}"


def too_many_ranks(draft: Draft) -> str:
    """Split a layer for one rank more than there are, so that no rank has the last part."""
    node = draft.pick(draft.split_parameters(axis=(axis := draft.pick(_SUMMED, "axis"))), axis)
    old = part_of(node, axis)
    if old.units <= draft.tp:
        raise UnfitError("there is nothing for one rank more")
    new = with_parts(old, even_runs(old.units, draft.tp + 1))
    for member in alike(draft, axis, node):
        other_axes = {part.axis for part in segments_of(member)} - {axis}
        if other_axes:
            raise UnfitError("other axes are fused with it")
        relayout(member, axis, new)
        parameter = parameter_of(member)
        set_parameter(member, replace(parameter, shards=parameter.shards[: draft.tp]))
    return f"layer {layer_of(node)}: {axis} split for {draft.tp + 1} ranks"


def scatter_for_more(draft: Draft) -> str:
    """Scatter sums to one rank more than there are."""
    nodes = draft.calls(REDUCE_SCATTER)
    chosen = nodes if draft.dice.random() < 0.5 else [draft.pick(nodes, "scatter")]
    for node in chosen:
        node.update_arg(1, draft.tp + 1)
    return (
        f"%{draft.pick(chosen, 'scatter').name} and {len(chosen) - 1} more for {draft.tp + 1} ranks"
    )


def alike(draft: Draft, axis: str, node: fx.Node) -> list[fx.Node]:
    return [n for n in draft.split_parameters(axis=axis) if layer_of(n) == layer_of(node)]


def part_of(node: fx.Node, axis: str) -> Layout:
    return next(part for part in segments_of(node) if part.axis == axis)


def bias_elsewhere(draft: Draft) -> str:
    """Split the bias of a column-parallel linear differently from its weight."""
    biases = [n for n in draft.split_parameters(dim=0) if value_type(n).dims == 1]
    node = draft.pick(biases, "split bias")
    size = int(value_type(node).shape[0])
    old, axis = shard_of(node).layout, "+".join(part.axis for part in segments_of(node))
    new = Layout(axis, size, 1, even_runs(size, draft.tp))
    if all(merged(old.intervals(r)) == merged(new.intervals(r)) for r in range(draft.tp)):  # type: ignore[union-attr]
        raise UnfitError("an even split is correct")
    set_parameter(node, parameter_of(node).sharded(0, new))
    return f"%{node.name} cut into even elements"
