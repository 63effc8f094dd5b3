"""Views, splits and row selections: types agree with torch, whole and per rank."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ir.ranks import (
    Operand,
    infer,
    operand,
    random,
    refusal,
    refused,
    run,
    sound_or_refused,
    whole_numbers,
)
from tests.ir.strategies import EXAMPLES, RANKS, fused_layouts, layouts
from tpcompile.ir.layout import FusedLayout, Layout, TokenLayout, even_runs
from tpcompile.ir.ops import SPECS, RuleError
from tpcompile.ir.types import PARTIAL, Shard, SymbolType, ValueType

aten = torch.ops.aten
UNFLATTEN, FLATTEN = aten.unflatten.int, aten.flatten.using_ints
SPLIT, CONCAT, SELECT = aten.split_with_sizes.default, aten.cat.default, aten.select.int
STACK = aten.stack.default
SLICE, TRANSPOSE, UNSQUEEZE = aten.slice.Tensor, aten.transpose.int, aten.unsqueeze.default
VIEWS = (aten.view.default, aten.reshape.default)
REPEAT = aten.repeat_interleave.self_int
ROWS, INDEX, EXTENT = aten.index_select.default, aten.index.Tensor, aten.sym_size.int
CHUNK, SQUEEZE, EXPAND = aten.chunk.default, aten.squeeze.dim, aten.expand.default
PLAIN = (aten.contiguous.default, aten.alias.default, aten.clone.default)

HEADS = Layout("heads", 3, 4, even_runs(3, 2))


@st.composite
def placed(draw: st.DrawFn, ranks: int, dims: int = 3) -> Operand:
    """Draw a value of `dims` dimensions, of which at most one is split."""
    shape = [draw(st.integers(1, 4)) for _ in range(dims)]
    dim = draw(st.none() | st.integers(0, dims - 1))
    if dim is None:
        return whole_numbers(*shape)
    layout = draw(st.one_of(layouts(ranks, overlapping=True), fused_layouts(ranks)))
    shape[dim] = layout.size
    return whole_numbers(*shape).sharded(dim, layout)


@EXAMPLES
@given(st.data(), RANKS)
def test_moves_that_the_rules_take_are_torch_s(data: st.DataObject, ranks: int) -> None:
    """Rules of data movement agree with torch; they refuse only changes of the split dimension."""
    x = data.draw(placed(ranks) | st.builds(Operand.partial, placed(1).filter(_is_whole)))
    dim = data.draw(st.integers(-3, 2))
    extent = x.whole.shape[dim]
    start = data.draw(st.integers(-extent, extent))
    index = operand(torch.tensor(data.draw(st.lists(st.integers(0, extent - 1), min_size=1))))
    calls: tuple[tuple[Any, tuple[Any, ...]], ...] = (
        (TRANSPOSE, (dim, data.draw(st.integers(-3, 2)))),
        (UNSQUEEZE, (data.draw(st.integers(-4, 3)),)),
        (SELECT, (dim, data.draw(st.integers(0, extent - 1)))),
        (SLICE, (dim, start, data.draw(st.none() | st.integers(start, extent)), 1)),
        (ROWS, (dim, index)),
        (INDEX, ([*[None] * (dim % 3), index],)),
        *((op, ()) for op in PLAIN),
    )
    for op, arguments in calls:
        rule = refusal(op, x, *arguments)
        if rule is None:
            run(op, x, *arguments, ranks=ranks).assert_sound(exact=True)
        else:
            assert rule == "whole-axis"
            assert isinstance(x.kind.placement, Shard) and x.kind.placement.dim == dim % 3


def _is_whole(value: Operand) -> bool:
    return not isinstance(value.kind.placement, Shard)


@EXAMPLES
@given(st.data(), RANKS, st.integers(1, 4))
def test_heads_are_unflattened_and_flattened_again(
    data: st.DataObject, ranks: int, width: int
) -> None:
    layout = data.draw(layouts(ranks, grain=width, overlapping=True))
    x = random(3, layout.size, 2).sharded(1, layout)
    split = run(UNFLATTEN, x, 1, [-1, width], ranks=ranks)
    assert isinstance(split.kind, ValueType)
    assert split.kind.placement == Shard(1, layout.with_grain(1))
    split.assert_sound(exact=True)
    merged = run(FLATTEN, Operand(split.whole(), split.kind), 1, 2, ranks=ranks)
    assert merged.kind == x.kind
    merged.assert_sound(exact=True)


@EXAMPLES
@given(st.data(), RANKS, st.integers(0, 3))
def test_other_dimensions_are_unflattened_beside_the_split(
    data: st.DataObject, ranks: int, dim: int
) -> None:
    layout = data.draw(layouts(ranks, overlapping=True))
    place = data.draw(st.sampled_from([d for d in range(4) if d != dim]))
    shape = [2, 3, 2, 3]
    shape[dim], shape[place] = 6, layout.size
    x = random(*shape).sharded(place, layout)
    run(UNFLATTEN, x, dim, [-1, 2], ranks=ranks).assert_sound(exact=True)
    for start in range(3):
        if place != start + 1:
            run(FLATTEN, x, start, start + 1, ranks=ranks).assert_sound(exact=True)


@EXAMPLES
@given(st.data(), RANKS)
def test_fused_parts_are_split_again(data: st.DataObject, ranks: int) -> None:
    """Splitting uses global sizes; the sizes per rank follow from the layout."""
    layout = data.draw(fused_layouts(ranks, overlapping=True))
    sizes = [segment.size for segment in layout.segments]
    outcome = run(SPLIT, random(3, layout.size).sharded(1, layout), sizes, 1, ranks=ranks)
    assert isinstance(outcome.kind, tuple)
    assert [kind.placement for kind in outcome.kind] == [Shard(1, s) for s in layout.segments]
    outcome.assert_sound(exact=True)


@EXAMPLES
@given(st.data(), RANKS)
def test_whole_dimensions_are_split_and_joined(data: st.DataObject, ranks: int) -> None:
    layout = data.draw(layouts(ranks, overlapping=True))
    x = random(layout.size, 7)
    x = x.sharded(0, layout) if data.draw(st.booleans()) else x
    parts = run(SPLIT, x, [2, 4, 1], -1, ranks=ranks)
    parts.assert_sound(exact=True)
    assert isinstance(parts.kind, tuple)
    operands = [Operand(w, k) for w, k in zip(parts.whole(), parts.kind, strict=True)]
    run(CONCAT, operands, -1, ranks=ranks).assert_sound(exact=True)


def test_terms_of_a_sum_pass_through_moves() -> None:
    x = whole_numbers(3, 4).partial()
    for op, arguments in (
        (TRANSPOSE, (0, 1)),
        (UNSQUEEZE, (0,)),
        (SELECT, (0, 1)),
        (SLICE, (1, 1, 3, 1)),
        (UNFLATTEN, (1, [-1, 2])),
        (FLATTEN, (0, 1)),
        (ROWS, (0, operand(torch.tensor([2, 0])))),
    ):
        outcome = run(op, x, *arguments, ranks=3)
        assert isinstance(outcome.kind, ValueType)
        assert outcome.kind.placement == PARTIAL
        outcome.assert_sound(exact=True)


VIEWED = random(5, 12, symbols=["T"])


@pytest.mark.parametrize("op", VIEWS, ids=str)
@pytest.mark.parametrize("size", [[5, 3, 4], [5, -1], [5, -1, 6], [60], [-1], [5, 1, 12]], ids=str)
def test_views_of_known_extents(op: Any, size: list[int]) -> None:
    run(op, random(5, 12), size, ranks=2).assert_sound(exact=True)


@pytest.mark.parametrize("op", VIEWS, ids=str)
def test_views_keep_named_extents(op: Any) -> None:
    tokens = SymbolType("T")
    rule = SPECS[op].rule
    for size, shape in (
        ((tokens, -1, 4), ("T", 3, 4)),
        ((1, tokens, 12), (1, "T", 12)),
        ((tokens, 2, 6), ("T", 2, 6)),
        ((-1, 12), ("T", 12)),
        ((-1, 4), ("3*T", 4)),
        ((-1,), ("12*T",)),
    ):
        assert rule(VIEWED.kind, size) == ValueType(shape, torch.float32)


@pytest.mark.parametrize("op", VIEWS, ids=str)
def test_refuses_views(op: Any) -> None:
    """Views of split values, to literal extents (trap 24) or to other sizes are refused."""
    error = refused("view", op, random(4, 12).sharded(1, HEADS), [4, 3, 4])
    assert "canonicalize" in error.hint
    refused("view", op, random(4, 12).partial(), [4, 3, 4])
    refused("view", op, VIEWED, [1, 3, 4])
    refused("view", op, VIEWED, [-1, -1, 12])
    refused("view", op, VIEWED, [1, -1, 12])
    refused("view", op, VIEWED, [3, -1])
    refused("view", op, VIEWED, [-1, 5])
    refused("view", op, random(5, 12), [5, 13])
    refused("view", op, random(5, 12), [7, -1])


def test_refuses_steps_and_widths_that_torch_refuses() -> None:
    refused("slice", SLICE, random(4, 12), 1, None, None, -1)
    refused("unflatten", UNFLATTEN, random(4, 12), 1, [-1, -2])


def test_refuses_to_touch_a_split_dimension() -> None:
    x = random(4, 12).sharded(1, HEADS)
    refused("whole-axis", SELECT, x, 1, 0)
    refused("whole-axis", SLICE, x, 1, 0, 4, 1)
    refused("whole-axis", CONCAT, [x, x], 1)
    refused("whole-axis", ROWS, x, 1, operand(torch.tensor([0])))
    refused("whole-axis", INDEX, x, [None, operand(torch.tensor([0]))])
    refused("whole-axis", FLATTEN, x, 0, 1)


def test_refuses_to_split_a_head() -> None:
    """Splitting a head is refused, since per-head norm and rotation need whole heads."""
    x = random(4, 12).sharded(1, HEADS)
    for width in (1, 2, 6, 12):
        error = refused("whole-heads", UNFLATTEN, x, 1, [-1, width])
        assert "whole head" in error.hint
    fused = FusedLayout((HEADS,))
    refused("whole-heads", UNFLATTEN, random(4, 12).sharded(1, fused), 1, [-1, 4])
    tokens = random(4, 12, symbols=["T"]).sharded(0, TokenLayout(2))
    refused("unflatten", UNFLATTEN, tokens, 0, [-1, 2])


def test_refuses_unflattenings_that_do_not_fit() -> None:
    for sizes in ([3, 4], [-1], [-1, 2, 2], [-1, 5]):
        refused("unflatten", UNFLATTEN, random(4, 12), 1, sizes)


def test_refuses_flattenings_that_are_not_of_two_known_neighbours() -> None:
    refused("flatten", FLATTEN, random(2, 3, 4), 0, 2)
    refused("flatten", FLATTEN, random(2, 3, 4), 1, 1)
    refused("flatten", FLATTEN, random(2, 3, 4, symbols=["T"]), 0, 1)
    fused = FusedLayout((Layout("a", 3, 1, even_runs(3, 2)),))
    refused("flatten", FLATTEN, random(3, 4).sharded(0, fused), 0, 1)


FUSED = FusedLayout((HEADS, Layout("kv", 2, 4, even_runs(2, 2))))


def test_refuses_local_sizes_in_a_split() -> None:
    """Split sizes are global; sizes of one rank, or of one rank times tp, are refused."""
    x = random(3, 20).sharded(1, FUSED)
    local = [segment.extent(0) for segment in FUSED.segments]
    error = refused("split-sizes", SPLIT, x, local, 1)
    assert "global" in error.hint
    refused("split-sizes", SPLIT, x, [2 * size for size in local], 1)
    refused("split-sizes", SPLIT, random(3, 20), [12, 4], 1)


def test_refuses_to_split_elsewhere_than_where_it_was_fused() -> None:
    x = random(3, 20).sharded(1, FUSED)
    for sizes in ([8, 12], [16, 4], [12, 4, 4]):
        refused("split-segments", SPLIT, x, sizes, 1)
    single = random(3, 12).sharded(1, HEADS)
    refused("split-segments", SPLIT, single, [4, 8], 1)
    refused("partial-nonlinear", SPLIT, random(3, 20).partial(), [12, 8], 1)


def test_a_part_may_consist_of_several_that_were_fused() -> None:
    """The channels of linear attention, which are split in three later, are one part with gates."""
    three = FusedLayout((*FUSED.segments, HEADS))
    x = random(3, 32).sharded(1, three)
    whole, last = infer(SPLIT, x, [20, 12], 1)
    assert (whole.layout_of(1), last.layout_of(1)) == (FUSED, HEADS)
    run(SPLIT, x, [20, 12], 1, ranks=2).assert_sound(exact=True)
    assert infer(SPLIT, random(3, 20).sharded(1, FUSED), [20], 1)[0].layout_of(1) == FUSED


def test_refuses_to_join_what_lies_differently() -> None:
    x = random(3, 12)
    heads = Layout("heads", 3, 1, even_runs(3, 2))
    for other in (x.sharded(0, heads), x.partial()):
        refused("same-layout", CONCAT, [x, other], 1)
        refused("same-layout", CONCAT, [other, x], 1)
    refused("same-layout", CONCAT, [x.partial(), x.partial()], 1)
    refused("concat", CONCAT, [random(3, 4, symbols=["T"])] * 2, 0)


def test_refuses_to_join_shapes_that_do_not_fit() -> None:
    with pytest.raises(RuleError):
        infer(CONCAT, [random(2, 3), random(2, 4)], 0)
    with pytest.raises(RuleError):
        infer(CONCAT, [random(4, 3, symbols=["T"]), random(4, 3, symbols=["R"])], 1)


def test_joined_dtypes_are_torch_s() -> None:
    sound_or_refused(CONCAT, [random(2, 3), operand(torch.ones(2, 3, dtype=torch.bfloat16))], 0)
    sound_or_refused(CONCAT, [operand(torch.ones(2, 3, dtype=torch.bfloat16)), random(2, 3)], 0)


def test_refuses_rows_that_are_no_list() -> None:
    index = operand(torch.tensor([0, 1, 2, 3]), ["R"])
    refused("rows", ROWS, random(4, 12), 0, index.sharded(0, TokenLayout(2, "R")))
    refused("rows", ROWS, random(4, 12), 0, operand(torch.tensor([[0]])))


def test_a_mask_as_an_index_is_sound_or_refused() -> None:
    """A mask is sound or refused, since its result's size depends on its values."""
    sound_or_refused(INDEX, random(4, 3), [operand(torch.tensor([True, False, True, False]))])


def test_two_indices_are_sound_or_refused() -> None:
    pick = operand(torch.tensor([0, 1]))
    sound_or_refused(INDEX, random(4, 3), [pick, pick])


def test_named_extents_are_kept_whole_in_slices() -> None:
    x = random(4, 3, symbols=["T"])
    for end in (None, 1 << 62, 9223372036854775807):
        assert infer(SLICE, x, 0, 0, end, 1) == x.kind
    refused("slice", SLICE, x, 0, 1, None, 1)
    refused("slice", SLICE, x, 0, 0, 2, 1)


def test_steps_through_named_extents_are_refused() -> None:
    """A slice with step 2 changes a symbolic extent, so it is refused."""
    with pytest.raises(RuleError):
        infer(SLICE, random(4, 3, symbols=["T"]), 0, 0, None, 2)


def test_one_of_several_values_is_picked() -> None:
    kinds = (random(3, 4).kind, random(3, 2).kind)
    rule = SPECS[operator.getitem].rule
    assert [rule(kinds, number) for number in (0, 1, -1)] == [*kinds, kinds[1]]
    for wrong in ((kinds, 2), (kinds[0], 0)):
        with pytest.raises(RuleError):
            rule(*wrong)


def test_the_extent_of_tokens() -> None:
    assert infer(EXTENT, random(4, 3, symbols=["T"]), 0) == SymbolType("T")
    refused("symbol", EXTENT, random(4, 3), 0)


def test_the_extent_of_tokens_on_ranks_is_refused() -> None:
    """The symbolic extent is global, but a rank would see its local one."""
    with pytest.raises(RuleError):
        infer(EXTENT, random(4, 3, symbols=["T"]).sharded(0, TokenLayout(2)), 0)


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (SELECT, (2, 0)),
        (SLICE, (2, 0, 1, 1)),
        (TRANSPOSE, (0, 2)),
        (UNFLATTEN, (2, [-1, 2])),
        (SPLIT, ([1, 3], 2)),
        (SELECT, (0, 9)),
        (FLATTEN, (1, 2)),
        (UNSQUEEZE, (4,)),
    ],
    ids=str,
)
def test_refuses_dimensions_that_do_not_exist(op: Any, arguments: tuple[Any, ...]) -> None:
    with pytest.raises((IndexError, RuntimeError)):
        SPECS[op].call(SPECS[op].bind((random(4, 4).whole, *arguments), {}))
    with pytest.raises(RuleError):
        infer(op, random(4, 4), *arguments)


def test_chunks_are_split_as_torch_does() -> None:
    for extent, count in ((6, 2), (7, 2), (7, 3), (2, 3)):
        run(CHUNK, random(3, extent), count, 1, ranks=2).assert_sound(exact=True)
    run(CHUNK, random(12, 6).sharded(0, HEADS), 2, -1, ranks=2).assert_sound(exact=True)
    refused("split", CHUNK, random(4, 6, symbols=["T"]), 2, 0)
    sound_or_refused(CHUNK, random(4, 12).sharded(1, HEADS), 2, 1)


def test_dimensions_of_one_are_dropped_and_spread() -> None:
    x = random(4, 1, 12)
    run(SQUEEZE, x, 1, ranks=2).assert_sound(exact=True)
    run(SQUEEZE, x.sharded(2, HEADS), -2, ranks=2).assert_sound(exact=True)
    refused("squeeze", SQUEEZE, x, 0)
    refused("squeeze", SQUEEZE, random(4, 1, symbols=["T"]), 0)
    run(EXPAND, x, [4, 3, -1], ranks=2).assert_sound(exact=True)
    tokens = random(1, 5, symbols=[None, "T"]).kind
    assert SPECS[EXPAND].rule(tokens, (3, SymbolType("T"))) == ValueType((3, "T"), torch.float32)
    refused("expand", EXPAND, x, [4, 3, 13])
    refused("expand", EXPAND, x, [2, 4, 3, 12])
    refused("expand", EXPAND, x.sharded(2, HEADS), [4, 3, -1])
    refused("expand", EXPAND, x.partial(), [4, 3, -1])


def test_merged_tokens_are_split_again() -> None:
    tokens, rule = SymbolType("T"), SPECS[VIEWS[0]].rule
    merged = ValueType(("3*T", 4), torch.float32)
    assert rule(merged, (tokens, -1)) == VIEWED.kind
    assert rule(merged, (-1, 12)) == VIEWED.kind
    assert rule(merged, (tokens, 3, 4)) == ValueType(("T", 3, 4), torch.float32)
    with pytest.raises(RuleError, match="view"):
        rule(merged, (SymbolType("R"), -1))
    with pytest.raises(RuleError, match="view"):
        rule(merged, (tokens, 4))


@EXAMPLES
@given(st.data(), RANKS)
def test_repeated_heads(data: st.DataObject, ranks: int) -> None:
    """Each head or element is repeated, of a value that every rank has whole."""
    x = data.draw(placed(ranks))
    repeats, dim = data.draw(st.integers(1, 3)), data.draw(st.sampled_from((None, -3, -2, -1, 1)))
    rule = refusal(REPEAT, x, repeats, dim)
    if rule is None:
        assert dim in (-2, -1, 1)
        run(REPEAT, x, repeats, dim, ranks=ranks).assert_sound(exact=True)
    else:
        assert rule == "repeat-heads"
        assert dim not in (-2, -1, 1) or isinstance(x.kind.placement, Shard)


@EXAMPLES
@given(st.data(), RANKS)
def test_stacked_values(data: st.DataObject, ranks: int) -> None:
    x = data.draw(placed(ranks))
    dim = data.draw(st.integers(-4, 3))
    run(STACK, [x, x], dim, ranks=ranks).assert_sound(exact=True)


def test_refuses_to_stack_values_of_other_types() -> None:
    x = whole_numbers(2, 3)
    refused("stack", STACK, [x, whole_numbers(2, 4)])
    refused("stack", STACK, [x, x.sharded(0, Layout("heads", 2, 1, even_runs(2, 2)))])
    refused("partial-nonlinear", STACK, [x.partial(), x.partial()])
    refused("dimension", STACK, [x, x], 3)
