"""Pieces agree with plain torch: values, bytes read, and the inverse."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.nn import functional

from tests.ir.byte_ranges import byte_ranges
from tests.ir.strategies import EXAMPLES, RANKS, fused_layouts, layouts, numbered, recipes
from tpcompile.ir.layout import AnyLayout, FusedLayout, Layout
from tpcompile.ir.meta import Parameter
from tpcompile.ir.pieces import evaluate, merge, pieces, restrict, unshard
from tpcompile.ir.recipe import (
    Concat,
    Pad,
    Permute,
    Recipe,
    Slice,
    Tensor,
    shape_of,
    shard,
    take,
    tensors_of,
)

Tensors = dict[str, torch.Tensor]


def meaning(recipe: Recipe, tensors: Tensors) -> torch.Tensor:
    """Evaluate a recipe in plain torch, as the oracle."""
    match recipe:
        case Tensor(name):
            return tensors[name]
        case Slice(source, dim, start, stop):
            return meaning(source, tensors).narrow(dim, start, stop - start)
        case Concat(sources, dim):
            return torch.cat([meaning(source, tensors) for source in sources], dim)
        case Permute(source, dim, view, order):
            unflattened = meaning(source, tensors).unflatten(dim, view)
            leading, trailing = range(dim), range(dim + len(view), unflattened.dim())
            turned = unflattened.permute(*leading, *(dim + axis for axis in order), *trailing)
            return turned.flatten(dim, dim + len(view) - 1)
        case Pad(source, dim, rows):
            value = meaning(source, tensors)
            behind = value.dim() - 1 - dim
            return functional.pad(value, (0, 0) * behind + (0, rows))


def reader(tensors: Tensors):  # type: ignore[no-untyped-def]
    return lambda name, index: tensors[name][index]


def numbers(recipe: Recipe) -> Tensors:
    return numbered(tensors_of(recipe))


@EXAMPLES
@given(recipes())
def test_a_recipe_gives_what_torch_gives(recipe: Recipe) -> None:
    tensors = numbers(recipe)
    expected = meaning(recipe, tensors)
    assert shape_of(recipe) == tuple(expected.shape)
    assert torch.equal(evaluate(recipe, reader(tensors)), expected)
    into = torch.zeros(expected.shape, dtype=torch.float64)
    assert evaluate(recipe, reader(tensors), into) is into
    assert torch.equal(into, expected.double())


@EXAMPLES
@given(recipes(), st.data())
def test_taking_simplifies_without_changing_the_value(recipe: Recipe, data: st.DataObject) -> None:
    tensors, shape = numbers(recipe), shape_of(recipe)
    dim = data.draw(st.integers(0, len(shape) - 1))
    start = data.draw(st.integers(0, shape[dim] - 1))
    stop = data.draw(st.integers(start + 1, shape[dim]))
    taken = take(recipe, dim, start, stop)
    expected = meaning(recipe, tensors).narrow(dim, start, stop - start)
    assert shape_of(taken) == tuple(expected.shape)
    assert torch.equal(meaning(taken, tensors), expected)
    assert not isinstance(recipe, Tensor) or not isinstance(taken, Concat)


@EXAMPLES
@given(recipes(), st.data())
def test_restricted_pieces_are_the_pieces_of_the_part(recipe: Recipe, data: st.DataObject) -> None:
    tensors, shape = numbers(recipe), shape_of(recipe)
    dim = data.draw(st.integers(0, len(shape) - 1))
    cuts = sorted(data.draw(st.sets(st.integers(0, shape[dim]), min_size=2, max_size=4)))
    runs = tuple(zip(cuts[::2], cuts[1::2], strict=False))
    expected = torch.cat([meaning(recipe, tensors).narrow(dim, a, b - a) for a, b in runs], dim)
    actual = torch.zeros_like(expected)
    for piece in restrict(pieces(recipe), dim, runs):
        value = tensors[piece.tensor]
        for axis, chosen in enumerate(piece.source):
            value = value.index_select(axis, torch.tensor([i for run in chosen for i in run]))
        actual[tuple(slice(*box) for box in piece.target)] = value
    assert torch.equal(actual, expected)


@EXAMPLES
@given(st.data())
def test_shards_put_together_are_the_tensors(data: st.DataObject) -> None:
    """Reassembled shards equal the tensors, for uneven, overlapping and fused layouts."""
    ranks = data.draw(RANKS)
    layout: AnyLayout = data.draw(
        st.one_of(
            layouts(ranks, overlapping=True), layouts(ranks), fused_layouts(ranks, overlapping=True)
        )
    )
    assert isinstance(layout, Layout | FusedLayout)
    dim, width = data.draw(st.integers(0, 1)), data.draw(st.integers(1, 3))
    sizes = (
        [segment.size for segment in layout.segments]
        if isinstance(layout, FusedLayout)
        else [layout.size]
    )
    shapes = [(size, width) if dim == 0 else (width, size) for size in sizes]
    parts = [Tensor(f"part{i}.weight", shape) for i, shape in enumerate(shapes)]
    whole: Recipe = parts[0] if len(parts) == 1 else Concat(tuple(parts), dim)
    parameter = Parameter.replicated(whole, torch.int64, ranks).sharded(dim, layout)
    tensors = numbers(whole)
    values = [evaluate(recipe, reader(tensors)) for recipe in parameter.shards]
    for rank, value in enumerate(values):
        assert tuple(value.shape) == parameter.type.local_shape(rank)
    for tensor in parts:
        shards = list(zip(parameter.shards, values, strict=True))
        assert torch.equal(unshard(tensor.name, tensor.shape, shards), tensors[tensor.name])


def test_putting_together_refuses_what_no_rank_holds() -> None:
    whole = Tensor("w", (6, 2))
    shards = [shard(whole, 0, [(0, 2)]), shard(whole, 0, [(3, 6)])]
    values = [evaluate(recipe, reader(numbers(whole))) for recipe in shards]
    with pytest.raises(ValueError, match="the ranks do not hold all of w"):
        unshard("w", (6, 2), zip(shards, values, strict=True))
    with pytest.raises(ValueError, match="the ranks do not hold all of absent"):
        unshard("absent", (6, 2), zip(shards, values, strict=True))


def marked(recipe: Recipe) -> dict[str, set[int]]:
    """Return the elements of each tensor that reach the result, as the oracle of what is read."""
    tensors = numbers(recipe)
    through = set(meaning(recipe, tensors).flatten().tolist())
    return {
        name: {place for place, number in enumerate(value.flatten().tolist()) if number in through}
        for name, value in tensors.items()
    }


@EXAMPLES
@given(recipes())
def test_byte_ranges_are_those_of_the_elements_used(recipe: Recipe) -> None:
    ranges_by_tensor = byte_ranges(recipe, itemsize=4)
    expected = {name: places for name, places in marked(recipe).items() if places}
    assert {
        name: {b // 4 for r in ranges for b in range(*r)}
        for name, ranges in ranges_by_tensor.items()
    } == expected
    for ranges in ranges_by_tensor.values():
        assert ranges == merge(ranges)


def assert_reads_what_it_says(recipe: Recipe) -> None:
    tensors = numbers(recipe)
    elements: dict[str, set[int]] = {}
    places = {n: torch.arange(t.numel()).view(t.shape) for n, t in tensors.items()}

    def read(name: str, index: tuple[slice, ...]) -> torch.Tensor:
        elements.setdefault(name, set()).update(places[name][index].flatten().tolist())
        return tensors[name][index]

    evaluate(recipe, read)
    told = byte_ranges(recipe, itemsize=1)
    read_places = {name: indices for name, indices in elements.items() if indices}
    assert read_places == {n: {i for r in ranges for i in range(*r)} for n, ranges in told.items()}


@EXAMPLES
@given(recipes())
def test_what_is_read_is_what_the_byte_ranges_say(recipe: Recipe) -> None:
    assert_reads_what_it_says(recipe)


def test_a_permuted_tensor_is_one_piece_of_runs() -> None:
    """Interleaving heads of eight gives one piece with a run per pair, for any number of rows."""
    (piece,) = pieces(Permute(Tensor("w", (16, 2)), 0, (2, 2, 4), (0, 2, 1)))
    assert piece.target == ((0, 16), (0, 2))
    pairs = tuple(range(first, first + 5, 4) for first in (0, 1, 2, 3, 8, 9, 10, 11))
    assert piece.source == (pairs, (range(2),))


def test_rows_between_those_of_a_rank_are_not_read() -> None:
    """A rank reads only its own rows of an interleaved tensor."""
    turned = Permute(Tensor("w", (6, 2)), 0, (3, 2), (1, 0))
    assert_reads_what_it_says(take(turned, 0, 0, 3))


def test_byte_ranges_of_a_file_are_enough_to_make_the_parameter(tmp_path: Path) -> None:
    """The declared byte ranges of a file suffice: the rank reads no other bytes."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "q": torch.randn(12, 5, generator=generator),
        "k": torch.randn(8, 5, generator=generator),
        "o": torch.randn(4, 12, generator=generator),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    raw = path.read_bytes()
    (header_size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + header_size])
    body = raw[8 + header_size :]
    q, k, o = (Tensor(name, tuple(value.shape)) for name, value in tensors.items())
    turned = Permute(q, 0, (3, 2, 2), (0, 2, 1))
    for recipe in (
        q,
        shard(Concat((q, k), 0), 0, [(1, 3), (10, 14)]),
        shard(o, 1, [(2, 5), (9, 12)]),
        take(turned, 0, 4, 8),
        Pad(Slice(k, 1, 1, 3), 0, 2),
    ):
        masked = {}
        for name, ranges in byte_ranges(recipe, itemsize=4).items():
            offset, _ = header[name]["data_offsets"]
            spoilt = torch.full_like(tensors[name], float("nan")).numpy().tobytes()
            data = bytearray(spoilt)
            for start, stop in ranges:
                data[start:stop] = body[offset + start : offset + stop]
            masked[name] = torch.frombuffer(data, dtype=torch.float32).view(tensors[name].shape)
        assert torch.equal(evaluate(recipe, reader(masked)), meaning(recipe, tensors))


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("padding alone", Slice(Pad(Tensor("w", (3, 2)), 0, 4), 0, 4, 6)),
        ("padding, permuted", Permute(Pad(Tensor("w", (3, 2)), 0, 1), 0, (2, 2), (1, 0))),
        (
            "columns of two tensors, permuted by rows",
            Permute(Concat((Tensor("a", (4, 2)), Tensor("b", (4, 1))), 1), 0, (2, 2), (1, 0)),
        ),
        (
            "two runs of columns of one tensor, stacked and permuted by rows",
            Permute(
                Concat(
                    (Slice(Tensor("w", (2, 4)), 1, 0, 2), Slice(Tensor("w", (2, 4)), 1, 2, 4)), 0
                ),
                0,
                (2, 2),
                (1, 0),
            ),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_corners_give_what_torch_gives(name: str, recipe: Recipe) -> None:
    tensors = numbers(recipe)
    assert torch.equal(evaluate(recipe, reader(tensors)), meaning(recipe, tensors))


def test_merged_intervals_touch_nowhere() -> None:
    assert merge([(4, 6), (0, 2), (2, 3), (5, 9)]) == [(0, 3), (4, 9)]
    assert merge([]) == []


def test_a_scalar_is_read_whole() -> None:
    scalar = Tensor("s", ())
    tensors = {"s": torch.tensor(3)}
    assert torch.equal(evaluate(scalar, reader(tensors)), tensors["s"])
    assert byte_ranges(scalar, itemsize=8) == {"s": [(0, 8)]}
