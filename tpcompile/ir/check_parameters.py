"""Checks that each rank's recipe produces the part of a parameter that its type describes.

The checks are independent of the code that makes recipes. They compare what a recipe reads, piece
by piece, with the part of the whole parameter that the layout assigns to the rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch import fx

from tpcompile.ir.format import Component
from tpcompile.ir.layout import Interval, TokenLayout
from tpcompile.ir.meta import Parameter, has_recipe, made_of, parameter_of
from tpcompile.ir.ops.spec import RuleError
from tpcompile.ir.pieces import Piece, merge, pieces, restrict
from tpcompile.ir.recipe import (
    Concat,
    Pad,
    Permute,
    Recipe,
    Slice,
    Tensor,
    concat,
    describe,
    head_parts,
    shape_of,
    take,
    tensors_of,
)
from tpcompile.ir.roles import HeadParts, Interleaved, Run
from tpcompile.ir.types import REPLICATE, AnyType, Shard, ValueType


def check_ranks(kind: AnyType, ranks: int) -> None:
    """Refuse a layout whose number of ranks differs from `ranks`."""
    for part in kind if isinstance(kind, tuple) else (kind,):
        if isinstance(part, ValueType) and isinstance(part.placement, Shard):
            count = part.placement.layout.ranks
            if count != ranks:
                raise RuleError("ranks", f"{part} on {count} ranks", f"a layout on {ranks} ranks")


def check_parameter(parameter: Parameter, ranks: int) -> None:
    """Refuse a parameter whose recipes do not produce what its type describes."""
    kind = parameter.type
    refusal = kind.refusal()
    if refusal:
        raise RuleError("layout", refusal, "a layout in which each unit is on some rank")
    check_ranks(kind, ranks)
    if len(parameter.shards) != ranks:
        raise RuleError("recipe", f"{len(parameter.shards)} recipes", f"{ranks}, one per rank")
    if shape_of(parameter.whole) != kind.shape:
        raise RuleError("recipe", f"shape {shape_of(parameter.whole)}", f"shape {kind.shape}")
    check_format(parameter)
    whole = pieces(parameter.whole)
    for rank, recipe in enumerate(parameter.shards):
        if shape_of(recipe) != kind.local_shape(rank):
            raise RuleError(
                "recipe",
                f"shape {shape_of(recipe)} on rank {rank}",
                f"shape {kind.local_shape(rank)}, from the type {kind}",
            )
        boxes = _boxes(pieces(recipe), kind)
        wanted = _boxes(_held_by(whole, kind, rank), kind)
        if boxes != wanted:
            raise RuleError(
                "recipe",
                f"{parameter.describe(rank)} on rank {rank}",
                f"the part of {parameter.describe()} that {kind} assigns to this rank",
                "make the shards with Parameter.sharded, from the same layout",
            )
        check_components(parameter, rank)


def check_format(parameter: Parameter) -> None:
    """Refuse a parameter of another format than its tensors, or rows that are cut elsewhere."""
    kind = parameter.type
    for recipe in (parameter.whole, *parameter.shards):
        for tensor in tensors_of(recipe):
            if tensor.format != kind.format:
                raise RuleError("format", f"{kind} made of {tensor}", "the format of its tensors")
    if kind.format is None:
        return
    if kind.dims not in (2, 3):
        raise RuleError("format", str(kind), "a matrix, with rows of columns, or a stack of these")
    layout = kind.layout_of(-1)
    if layout is None or isinstance(layout, TokenLayout):
        return
    columns = kind.shape[-1]
    for rank in range(layout.ranks):
        runs = layout.intervals(rank)
        edges = [edge for run in runs for edge in run if edge != columns]
        if len(runs) > 1 or any(edge % kind.format.grain for edge in edges):
            raise RuleError(
                "format",
                f"columns {runs} on rank {rank}",
                f"one run of columns that begins and ends at a multiple of {kind.format.grain}",
                "choose another tp",
            )


def check_components(parameter: Parameter, rank: int) -> None:
    """Refuse components of a rank's part that are not those of its rows and columns."""
    kind = parameter.type
    if kind.format is None:
        return
    shard_pieces, width = pieces(parameter.shards[rank]), kind.local_shape(rank)[-1]
    for piece in shard_pieces:
        if len(piece.source[-1]) != 1 or piece.target[-1] != (0, width):
            got = f"{parameter.describe(rank)} on rank {rank}"
            raise RuleError("format", got, "rows of which the columns are one run")
    for part, recipe in parameter.components(rank):
        wanted = _boxes(tuple(_piece_of(piece, part) for piece in shard_pieces), kind)
        if _boxes(pieces(recipe), kind) != wanted:
            raise RuleError(
                "components",
                f"{describe(recipe)} on rank {rank}",
                f"the part that belongs to {parameter.describe(rank)}",
            )


def _piece_of(piece: Piece, part: Component) -> Piece:
    """Return the piece of a component that belongs to a piece of a weight, one run of columns."""
    *rows, (columns,) = piece.source
    *extents, extent = piece.shape
    first, last = part.span(columns.start, columns.stop)
    return Piece(
        piece.tensor + part.suffix,
        (*extents, part.width(0, extent)),
        (*rows, (range(first, last),)),
        (*piece.target[:-1], (0, last - first)),
    )


def _held_by(whole: tuple[Piece, ...], kind: ValueType, rank: int) -> tuple[Piece, ...]:
    if not isinstance(kind.placement, Shard):
        if kind.placement != REPLICATE:
            raise RuleError("partial-weight", str(kind), "a weight that is Replicate or Shard")
        return whole
    layout = kind.placement.layout
    if isinstance(layout, TokenLayout):
        raise RuleError("layout", str(kind), "a parameter that is not sharded by tokens")
    return restrict(whole, kind.placement.dim, layout.intervals(rank))


def _boxes(unjoined: tuple[Piece, ...], kind: ValueType) -> dict[Any, list[Any]]:
    """Group pieces that agree in all dimensions but the sharded one; join adjacent ones."""
    dim = kind.placement.dim if isinstance(kind.placement, Shard) else 0
    joined: dict[Any, list[Any]] = {}
    for piece in sorted(unjoined, key=lambda p: (p.target[dim], p.tensor)):
        other_dims = tuple(
            (runs, box)
            for d, (runs, box) in enumerate(zip(piece.source, piece.target, strict=True))
            if d != dim
        )
        indices = joined.setdefault((piece.tensor, other_dims), [])
        start = piece.target[dim][0]
        for run in piece.source[dim]:
            _append(indices, start, run)
            start += len(run)
    return joined


def _append(indices: list[Any], start: int, run: range) -> None:
    if indices:
        last_start, last = indices[-1]
        if (
            last_start + len(last) == start
            and last.step == run.step
            and last[-1] + last.step == run[0]
        ):
            indices[-1] = (last_start, range(last[0], run[-1] + run.step, run.step))
            return
    indices.append((start, run))


def check_whole(parameter: Parameter) -> None:
    """Refuse a parameter whose rows are not the rows of its tensors, in the order of its type.

    Each tensor contributes consecutive rows with all their columns, one tensor after the other.
    Only interleaved heads have a different row order, which the type records.
    """
    whole, kind = parameter.whole, parameter.type
    whole_pieces = pieces(whole)
    try:
        runs = _runs_of(whole, whole_pieces, kind)
        ordered = concat([_rows_in_order(tensor, whole_pieces, run) for tensor, run in runs], 0)
    except _DisorderError as disorder:
        raise RuleError("recipe", f"{parameter.describe()}: {disorder}", _IN_ORDER) from disorder
    plain = kind.placed(REPLICATE)
    if _boxes(whole_pieces, plain) != _boxes(pieces(ordered), plain):
        raise RuleError("recipe", parameter.describe(), f"{describe(ordered)}: {_IN_ORDER}")


_IN_ORDER = "the rows of each tensor once, in checkpoint order or interleaved by head"


class _DisorderError(Exception):
    """Parameter rows that no valid order of the tensors produces."""


def _runs_of(
    whole: Recipe, whole_pieces: tuple[Piece, ...], kind: ValueType
) -> list[tuple[Tensor, tuple[int, int] | Run | None]]:
    """Pair the runs of rows of the type's role, if it has one, with the tensors that have them."""
    tensors = {tensor.name: tensor for tensor in tensors_of(whole)}
    if kind.role is None:
        return [(tensor, None) for tensor in tensors.values()]
    runs: tuple[Any, ...] = ()
    if isinstance(kind.role, Interleaved | HeadParts):
        runs = kind.role.runs
    names = {piece.target[0][0]: piece.tensor for piece in whole_pieces}
    firsts = list(accumulate((run[0] for run in runs), initial=0))[:-1]
    if not runs or not names.keys() >= set(firsts):
        raise _DisorderError(f"{len(tensors)} tensors for {kind}")
    return [(tensors[names[first]], run) for first, run in zip(firsts, runs, strict=True)]


def _rows_in_order(
    tensor: Tensor, whole_pieces: tuple[Piece, ...], run: tuple[int, int] | Run | None
) -> Recipe:
    """Return a recipe of the rows that are read from a tensor, in their correct order."""
    if isinstance(run, Run) and run.stride:
        return head_parts(tensor, run)
    row_runs = [piece.source[0] for piece in whole_pieces if piece.tensor == tensor.name]
    first = min((min(rows[0], rows[-1]) for runs in row_runs for rows in runs if rows), default=0)
    count = sum(len(rows) for runs in row_runs for rows in runs)
    if not 0 < count <= tensor.shape[0] - first:
        raise _DisorderError(f"{count} rows from row {first} of {tensor.name} {list(tensor.shape)}")
    rows = take(tensor, 0, first, first + count)
    if run is None or run[:2] == (count, 0):
        return rows
    size, width, *_ = run
    if size != count or width <= 0 or width % 2 or count % width:
        raise _DisorderError(f"{count} rows of {tensor.name} for {size} rows in heads of {width}")
    return Permute(rows, 0, (count // width, 2, width // 2), (0, 2, 1))


def tensor_owners(graph: fx.Graph) -> dict[str, list[fx.Node]]:
    """Return the parameters that are made of each checkpoint tensor, by its name."""
    owners: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if has_recipe(node):
            for name in {tensor.name for tensor in made_of(node)}:
                owners.setdefault(name, []).append(node)
    return owners


def unread_rows(owners: Mapping[str, Sequence[fx.Node]]) -> Iterator[tuple[fx.Node, RuleError]]:
    """Yield an error for each checkpoint tensor of which parameters hold only some rows."""
    for name, nodes in owners.items():
        if not any(_has_slice(parameter_of(node).whole) for node in nodes):
            continue
        read = merge([i for node in nodes for i in _rows_of(name, parameter_of(node))])
        for tensor in {tensor for node in nodes for tensor in made_of(node) if tensor.name == name}:
            if missing := tensor.shape[0] - _count(read):
                got = f"{missing} rows of {name} {list(tensor.shape)} in no parameter"
                yield (
                    nodes[-1],
                    RuleError("recipe", got, "each row of the tensor in some parameter"),
                )


def _has_slice(recipe: Recipe) -> bool:
    match recipe:
        case Tensor():
            return False
        case Slice():
            return True
        case Concat(sources=sources):
            return any(map(_has_slice, sources))
        case Permute(source=source) | Pad(source=source):
            return _has_slice(source)


def shared_tensors(owners: Mapping[str, Sequence[fx.Node]]) -> Iterator[tuple[fx.Node, RuleError]]:
    """Yield an error for each checkpoint tensor, or part of one, that two parameters hold.

    Tied weights stay one parameter.
    """
    for name, nodes in owners.items():
        taken: list[Interval] = []
        for node in nodes if len(nodes) > 1 else ():
            rows = _rows_of(name, parameter_of(node))
            merged = merge(taken + rows)
            if _count(merged) < _count(taken + rows):
                yield (
                    node,
                    RuleError(
                        "one-owner",
                        f"a second parameter made of {name}",
                        "one parameter per checkpoint tensor, used as often as needed",
                        "let tied weights share one parameter",
                    ),
                )
            taken = merged


def _rows_of(name: str, parameter: Parameter) -> list[Interval]:
    tensor_pieces = [piece for piece in pieces(parameter.whole) if piece.tensor == name]
    runs = (run for piece in tensor_pieces for run in piece.source[0])
    return [
        box
        for run in runs
        for box in ([(run.start, run.stop)] if run.step == 1 else ((i, i + 1) for i in run))
    ]


def _count(ranges: list[Interval]) -> int:
    return sum(stop - start for start, stop in ranges)


def parameter_key(parameter: Parameter, ranks: int) -> Any:
    """Return everything that the check of a parameter depends on, without tensor names.

    Layers are alike except for these names, so one check covers all layers.
    """
    names: dict[str, int] = {}
    recipes = (parameter.whole, *parameter.shards)
    return ranks, parameter.type, tuple(_nameless(recipe, names) for recipe in recipes)


def _nameless(recipe: Recipe, names: dict[str, int]) -> Any:
    match recipe:
        case Tensor(name, shape, stored):
            return names.setdefault(name, len(names)), shape, stored
        case Slice(source, dim, start, stop):
            return "slice", _nameless(source, names), dim, start, stop
        case Concat(sources, dim):
            return "concat", tuple(_nameless(source, names) for source in sources), dim
        case Permute(source, dim, view, order):
            return "permute", _nameless(source, names), dim, view, order
        case Pad(source, dim, rows):
            return "pad", _nameless(source, names), dim, rows
