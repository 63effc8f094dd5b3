"""Mistakes in the recipes of whole parameters: all ranks read the same wrong rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import fx

from benchmarks.mutations.draft import Draft, UnfitError
from tpcompile.ir.layout import FusedLayout, Layout
from tpcompile.ir.meta import Parameter, parameter_of, parameters, set_parameter
from tpcompile.ir.ops import ROPE
from tpcompile.ir.recipe import Concat, Pad, Permute, Recipe, Slice, shape_of
from tpcompile.ir.roles import Interleaved
from tpcompile.ir.types import Shard


def rows_repeated(draft: Draft) -> str:
    """Repeat a row, which moves the later rows down by one and drops the last."""
    node, whole, rows = _matrix(draft)
    row = draft.dice.randrange(rows - 1)
    recipe = Concat((Slice(whole, 0, 0, row + 1), Slice(whole, 0, row, rows - 1)), 0)
    return _rewritten(node, recipe, f"row {row} twice, for the last")


def rows_skipped(draft: Draft) -> str:
    """Leave out a row and pad the end with zeros."""
    node, whole, rows = _matrix(draft)
    row = draft.dice.randrange(rows)
    slices = [Slice(whole, 0, a, b) for a, b in ((0, row), (row + 1, rows)) if a < b]
    return _rewritten(node, Pad(Concat(tuple(slices), 0), 0, 1), f"row {row} left out")


def rows_permuted(draft: Draft) -> str:
    """Interleave the halves, swap the halves, or swap the first two rows."""
    node, whole, rows = _matrix(draft)
    ways: dict[str, Callable[[], Recipe]] = {
        "halves interleaved": lambda: Permute(whole, 0, (2, rows // 2), (1, 0)),
        "halves swapped": lambda: Concat(
            (Slice(whole, 0, rows // 2, rows), Slice(whole, 0, 0, rows // 2)), 0
        ),
        "the first two rows swapped": lambda: Concat(
            (Slice(whole, 0, 1, 2), Slice(whole, 0, 0, 1), Slice(whole, 0, 2, rows)), 0
        ),
    }
    order = draft.pick([name for name in ways if rows % 2 == 0 or "first" in name], "order")
    return _rewritten(node, ways[order](), order)


def columns_permuted(draft: Draft) -> str:
    node, whole, _ = _matrix(draft)
    columns = shape_of(whole)[1]
    turned = Concat((Slice(whole, 1, 1, columns), Slice(whole, 1, 0, 1)), 1)
    return _rewritten(node, turned, "columns rotated by one")


def of_another_tensor(draft: Draft) -> str:
    """Swap the tensors of two parameters of one shape, or take a row from the other tensor."""
    node, whole, rows = _matrix(draft)
    alike = [
        other
        for other in parameters(draft.graph)
        if other is not node and shape_of(parameter_of(other).whole) == shape_of(whole)
    ]
    other = draft.pick(alike, "parameter of the same shape")
    theirs = parameter_of(other).whole
    if draft.dice.random() < 0.5:
        mixed = Concat((Slice(theirs, 0, 0, 1), Slice(whole, 0, 1, rows)), 0)
        return _rewritten(node, mixed, f"with the first row of %{other.name}")
    _rewritten(other, whole, "")
    return _rewritten(node, theirs, f"swapped with %{other.name}")


def one_order_dropped(draft: Draft) -> str:
    """Keep the original order of a weight, bias or norm that interleave-rotary changed.

    The role in its type may be dropped or kept.
    """
    node = _interleaved(draft)
    parameter = parameter_of(node)
    assert isinstance(parameter.whole, Permute)
    kind = parameter.type.in_role(None)
    dropped = draft.dice.random() < 0.5
    plain = replace(parameter, type=kind if dropped else parameter.type)
    set_parameter(node, plain)
    return _rewritten(
        node, parameter.whole.source, f"as captured, role {'dropped' if dropped else 'kept'}"
    )


def other_pairs(draft: Draft) -> str:
    """Interleave heads by another width; the type may or may not agree."""
    node = _interleaved(draft)
    parameter = parameter_of(node)
    rows = int(parameter.type.shape[0])
    assert isinstance(parameter.whole, Permute)
    width = parameter.whole.view[1] * parameter.whole.view[2] // 2
    role = Interleaved(((rows, width),)) if draft.dice.random() < 0.5 else parameter.type.role
    set_parameter(node, replace(parameter, type=parameter.type.in_role(role)))
    view = (rows // width, 2, width // 2)
    return _rewritten(
        node, Permute(parameter.whole.source, 0, view, (0, 2, 1)), f"interleaved by {width}"
    )


def rotation_of_halves(draft: Draft) -> str:
    """Rotate interleaved heads as if they were not interleaved."""
    nodes = [node for node in draft.calls(ROPE) if len(node.args) > 3]
    node = draft.pick(nodes, "interleaved rotation")
    node.args = node.args[:3]
    return f"%{node.name} rotates halves"


def _interleaved(draft: Draft) -> fx.Node:
    nodes = [n for n in parameters(draft.graph) if parameter_of(n).type.role is not None]
    return draft.pick(nodes, "interleaved parameter")


def _matrix(draft: Draft) -> tuple[fx.Node, Recipe, int]:
    """Pick a two-dimensional parameter. The scales of norms are all equal: no change would show."""
    nodes = [n for n in parameters(draft.graph) if parameter_of(n).type.dims == 2]
    node = draft.pick(nodes, "matrix")
    whole = parameter_of(node).whole
    return node, whole, shape_of(whole)[0]


def _rewritten(node: fx.Node, whole: Recipe, description: str) -> str:
    """Set the recipe of the whole and, with the same layout, the recipes of all ranks."""
    old = parameter_of(node)
    new = Parameter(old.type, whole, ()).on_ranks(len(old.shards))
    placement = old.type.placement
    if isinstance(placement, Shard):
        if not isinstance(placement.layout, Layout | FusedLayout):
            raise UnfitError("it is split by tokens")
        new = new.sharded(placement.dim, placement.layout)
    set_parameter(node, new)
    return f"%{node.name} {description}"
