"""Formats of weights: components, the bytes of rows, and recipes of parts that cut groups."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.ir.byte_ranges import byte_ranges
from tpcompile.ir.check_parameters import check_parameter
from tpcompile.ir.dtypes import DTYPES, DType
from tpcompile.ir.format import FLOATS, Format, Kind
from tpcompile.ir.layout import Interval, Layout, even_runs
from tpcompile.ir.meta import Parameter
from tpcompile.ir.ops.few_bits import decoded
from tpcompile.ir.ops.spec import RuleError, local_bytes
from tpcompile.ir.pieces import evaluate
from tpcompile.ir.recipe import (
    Concat,
    Permute,
    Recipe,
    Slice,
    Tensor,
    component_of,
    first_column,
    shape_of,
    take,
)
from tpcompile.vm.groups.arithmetic import leaf_dots, leaves_of
from tpcompile.vm.program.weight import Weight

F32, BF16 = torch.float32, torch.bfloat16
KINDS = (Kind.INT8, Kind.INT4)
FORMATS = [
    *FLOATS,
    *(
        Format.grouped(kind, scales, columns, offsets=offsets)
        for kind in KINDS
        for scales in (F32, BF16)
        for columns in (0, 32, 128, 32767)
        for offsets in (False, True)
    ),
    *map(
        Format.parsed,
        (
            *("int4:32:f16min", "int5:32:f16", "int5:row:bf16:offsets", "int5:32:f16min"),
            *("int4:32:supermin", "int5:32:supermin", "int6:16:super", "int6:64:f32"),
            *("fp8:128:f32", "fp8:row:bf16"),
        ),
    ),
]
CUT = {
    "qwen2.5-0.5b o_proj": (896, 2, 128),
    "qwen2.5-72b down_proj": (29568, 1, 32),
    "qwen3-4b down_proj": (9728, 1, 128),
    "an expert 768 wide": (768, 1, 64),
    "qwen3-0.6b o_proj": (2048, 3, 256),
}
"""Columns, ranks and columns per group, of which ranks or the leaves of a sum cut groups."""
ROWS = 3


@pytest.mark.parametrize("stored", FORMATS, ids=str)
def test_its_name_and_its_number_say_all(stored: Format) -> None:
    assert Format.parsed(str(stored)) == Format(int(stored)) == stored
    assert -(2**31) <= stored < 2**31
    assert stored.plain == (stored in FLOATS)
    assert stored.offsets == str(stored).endswith(":offsets")
    assert stored.offsets == any(part.suffix == "_zero_point" for part in stored.components)
    assert str(stored).startswith(stored.kind.word)


def test_names_and_numbers() -> None:
    """Executors and files depend on them."""
    named = {
        "bf16": 2,
        "int8:row:f32": 7 | 1 << 8,
        "int4:64:bf16": 8 | 2 << 8 | 64 << 16,
        "int4:64:bf16:offsets": 8 | 2 << 8 | 1 << 15 | 64 << 16,
        "int8:row:f16:offsets": 7 | 3 << 8 | 1 << 15,
        "int8:row:f32:a8": 7 | 1 << 8 | 1 << 14,
        "fp8:128:f32": 11 | 1 << 8 | 128 << 16,
        "int4:64:bf16:offsets:a8": 8 | 2 << 8 | 1 << 14 | 1 << 15 | 64 << 16,
    }
    assert {word: int(Format.parsed(word)) for word in named} == named
    assert Kind.INT4 not in list(DType)


WORDS = ["int8", "int8:0:bf16", "int8:64:i8", "i32", "int8:99999:f32", ""]
WORDS += ["bf16:a8", "int8:64:bf16:a8:offsets", "int8:64:bf16:a16"]
WORDS += ["int4", "int4:64:bf16:", "int4:64:bf16:offset", "bf16:offsets", "i4:64:bf16"]


@pytest.mark.parametrize("word", WORDS)
def test_names_that_no_format_has(word: str) -> None:
    with pytest.raises(ValueError, match=r"int8|too wide"):
        Format.parsed(word)


NUMBERS = [
    0,
    DType.I32,
    7,
    8,
    11,
    12 | 1 << 8,
    11 | 17 << 8 | 32 << 16,
    11 | 1 << 8 | 1 << 14,
    11 | 1 << 8 | 1 << 15,
    7 | 16 << 8 | 32 << 16,
    8 | 17 << 8,
    8 | 17 << 8 | 48 << 16,
    8 | 19 << 8 | 32 << 16,
    10 | 17 << 8 | 1 << 15 | 16 << 16,
    1 | 2 << 8,
    1 | 64 << 16,
    1 | 1 << 15,
    1 | 1 << 14,
    7 | 4 << 8,
    -1,
]


@pytest.mark.parametrize("number", [*NUMBERS, 7 | 1 << 8 | 1 << 31, 7 | 1 << 15])
def test_numbers_that_no_format_has(number: int) -> None:
    with pytest.raises(ValueError, match="format"):
        Format(number)


@pytest.mark.parametrize("stored", [stored for stored in FORMATS if "int" in str(stored)], ids=str)
def test_formats_that_round_inputs(stored: Format) -> None:
    """They differ in nothing that concerns memory."""
    rounding = stored.rounding()
    assert rounding.rounds
    assert not stored.rounds
    assert rounding.rounding(False) == stored
    assert Format.parsed(f"{stored}:a8") == Format(int(rounding)) == rounding
    assert rounding.components == stored.components
    assert (rounding.kind, rounding.offsets) == (stored.kind, stored.offsets)
    assert rounding.block == min(stored.columns or 128, 128)


def test_the_bytes_of_rows() -> None:
    assert Format.of(BF16).row_bytes(3, 9) == 12
    assert Format.int8(BF16, 64).row_bytes(0, 128) == 128 + 2 * 2
    assert Format.int8(BF16, 64).row_bytes(48, 80) == 32 + 2 * 2
    assert Format.int8(F32).row_bytes(48, 80) == 32 + 4
    assert Format.int8(F32, offsets=True).row_bytes(48, 80) == 32 + 4 + 1
    assert Format.int4(BF16, 64).row_bytes(0, 100) == 13 * 4 + 2 * 2
    assert Format.int4(BF16, 64, offsets=True).row_bytes(48, 80) == 16 + 2 * 2 + 2


def weight(
    columns: int, group: int, kind: Kind = Kind.INT8
) -> tuple[Tensor, dict[str, torch.Tensor], torch.Tensor]:
    """Return a weight with offsets, its components by name, and its values."""
    torch.manual_seed(columns)
    most = 1 << (3 if kind == Kind.INT4 else 7)
    groups = -(-columns // group)
    values = torch.randint(-most, most, (ROWS, columns)).to(torch.int8)
    # Neighbouring groups differ: another group's scale or offset is seen.
    scales = torch.rand(ROWS, groups) + torch.arange(1, groups + 1)
    offsets = (torch.arange(groups) * 5 + torch.arange(ROWS)[:, None]) % (2 * most) - most
    offsets = offsets.to(torch.int8)
    tensor = Tensor("w", (ROWS, columns), Format.grouped(kind, F32, group, offsets=True))
    held = {"w": values, "w_scale": scales, "w_zero_point": offsets}
    if kind == Kind.INT4:
        held = {"w_packed": packed(held.pop("w")), **held}
    each_scale, each_offset = (
        per_group.repeat_interleave(group, 1)[:, :columns] for per_group in (scales, offsets)
    )
    return tensor, held, (values.float() - each_offset) * each_scale


def packed(values: torch.Tensor) -> torch.Tensor:
    """Pack the columns of 4-bit values into words, one word after the other."""
    words = []
    for row in values.tolist():
        padded = [*(value + 8 for value in row), *[0] * (-len(row) % 8)]
        unsigned = [
            sum(nibble << 4 * place for place, nibble in enumerate(padded[start : start + 8]))
            for start in range(0, len(padded), 8)
        ]
        words.append([word - (word >> 31 << 32) for word in unsigned])
    return torch.tensor(words, dtype=torch.int32)


def value(recipe: Recipe, stored: Format, held: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the values that a rank computes from the components that it reads."""
    parts = {
        part.suffix: evaluate(component_of(recipe, part), lambda name, index: held[name][index])
        for part in stored.components
    }
    first = first_column(recipe)
    return stored.decoded(parts, (first, first + shape_of(recipe)[1]), F32)


def columns_of_ranks(columns: int, tp: int) -> list[Interval]:
    """Split heads of 64 or 128, or the columns themselves, over ranks."""
    grain = 64 if columns % 128 or tp == 2 else 128
    return [(first * grain, last * grain) for ((first, last),) in even_runs(columns // grain, tp)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", CUT)
def test_ranks_and_leaves_that_cut_groups(name: str, kind: Kind) -> None:
    """Both sides of a cut read the scale of the group, and only bytes of their own columns."""
    columns, tp, group = CUT[name]
    tensor, held, whole = weight(columns, group, kind)
    stored = tensor.format
    assert stored is not None
    cuts = 0
    for start, stop in columns_of_ranks(columns, tp):
        part = take(tensor, 1, start, stop)
        assert torch.equal(value(part, stored, held), whole[:, start:stop])
        first, last = start // group, -(-stop // group)
        bits = 4 if kind == Kind.INT4 else 8
        sizes = [(stop - start) * bits // 8, (last - first) * 4, last - first]
        parts = {}
        for component, size in zip(stored.components, sizes, strict=True):
            recipe = component_of(part, component)
            (read,) = byte_ranges(recipe, component.dtype.itemsize).values()
            assert sum(high - low for low, high in read) == ROWS * size
            parts[component.suffix] = evaluate(recipe, lambda name, index: held[name][index])
        shard = Weight(stored, parts, (start, stop))
        for ((low, high),) in even_runs(stop - start, leaves_of(tp)):
            assert torch.equal(shard[1:ROWS, low:high], whole[1:, start + low : start + high])
            cuts += (start + low) % group > 0
        x = torch.randn(2, stop - start)
        dots = leaf_dots(x, shard[:], leaves_of(tp))
        wanted = leaf_dots(x, whole[:, start:stop], leaves_of(tp))
        assert all(map(torch.equal, dots, wanted))
    assert cuts > 0


def test_parts_of_parts_of_a_weight() -> None:
    tensor, held, whole = weight(256, 64)
    stored = tensor.format
    assert stored is not None
    part = take(Slice(tensor, 1, 48, 240), 1, 32, 144)
    assert first_column(part) == 80
    assert torch.equal(value(part, stored, held), whole[:, 80:192])
    nested = Slice(Slice(tensor, 1, 80, 240), 1, 32, 112)
    assert first_column(nested) == 112
    assert torch.equal(value(nested, stored, held), whole[:, 112:192])
    rows = Concat((take(part, 0, 2, 3), take(part, 0, 0, 2)), 0)
    assert torch.equal(value(rows, stored, held), whole[[2, 0, 1], 80:192])
    turned = Permute(take(tensor, 0, 0, 2), 0, (2, 1), (1, 0))
    assert torch.equal(value(turned, stored, held), whole[:2])
    assert shape_of(component_of(part, stored.components[1])) == (ROWS, 2)


def test_columns_that_are_not_one_run() -> None:
    tensor, *_ = weight(256, 64)
    joined = Concat((take(tensor, 1, 0, 64), take(tensor, 1, 128, 192)), 1)
    shifted = Concat((take(tensor, 1, 0, 64), take(tensor, 1, 64, 128)), 0)
    for function in (first_column, lambda part: component_of(part, tensor.format.components[1])):  # type: ignore[union-attr]
        with pytest.raises(ValueError, match="not one run"):
            function(joined)
    with pytest.raises(ValueError, match="not one run"):
        first_column(shifted)


def test_a_whole_row_shares_a_scale() -> None:
    stored = Format.int8(BF16)
    values, scales = torch.tensor([[1, -2, 3]], dtype=torch.int8), torch.tensor([[0.5]])
    assert torch.equal(
        decoded(str(stored), (values, scales), (7, 10), F32), torch.tensor([[0.5, -1.0, 1.5]])
    )


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("columns", [1, 7, 16, 43, 100])
def test_any_number_of_columns(kind: Kind, columns: int) -> None:
    """Of a last word, only the nibbles of columns count; any part of a row can be read."""
    tensor, held, whole = weight(columns, 16, kind)
    stored = tensor.format
    assert stored is not None
    assert torch.equal(value(tensor, stored, held), whole)
    if kind == Kind.INT4 and columns % 8:
        held["w_packed"][:, -1] |= -1 << 4 * (columns % 8)
    parts = {name.removeprefix("w"): part for name, part in held.items()}
    rows = Weight(stored, parts, (0, columns))
    assert rows.shape == (ROWS, columns)
    for start, stop in ((0, columns), (columns // 3, columns), (columns - 1, columns)):
        assert torch.equal(rows[:, start:stop], whole[:, start:stop])


def test_numbers_are_rounded_once() -> None:
    """The difference of value and offset is exact, and so is its product with a scale in bf16."""
    values = torch.arange(-128, 128, dtype=torch.int8)[None]
    offsets = torch.tensor([[-128]], dtype=torch.int8)
    scales = torch.tensor([[1 + 2**-7]], dtype=BF16)
    exact = (values.double() + 128) * scales.double()
    stored = Format.int8(BF16, offsets=True)
    for dtype in (F32, BF16):
        actual = decoded(str(stored), (values, scales, offsets), (0, 256), dtype)
        assert torch.equal(actual, exact.to(dtype))


FORMS = (Format.int8(F32, 64), Format.int4(F32, 64, offsets=True))


def parameter(stored: Format, *edges: int, name: str = "w", columns: int = 96) -> Parameter:
    """Return a weight whose columns are cut at these edges."""
    tensor = Tensor(name, (ROWS, columns), stored)
    parts = tuple(((low, high),) for low, high in zip((0, *edges), (*edges, columns), strict=True))
    whole = Parameter.replicated(tensor, F32, len(parts))
    return whole.sharded(1, Layout("ffn", columns, 1, parts))


def test_parameters_that_the_checker_accepts() -> None:
    sizes = []
    for stored in FORMS:
        sharded = parameter(stored, 48)
        check_parameter(sharded, 2)
        sizes.append([local_bytes(sharded.type, rank) for rank in (0, 1)])
    assert sizes == [
        [ROWS * (48 + 4), ROWS * (48 + 2 * 4)],
        [ROWS * (24 + 4 + 1), ROWS * (24 + 2 * (4 + 1))],
    ]


def _in_format(sharded: Parameter, stored: Format | None) -> Parameter:
    return replace(sharded, type=replace(sharded.type, format=stored))


def _by_rows(sharded: Parameter) -> Parameter:
    """Return the weight with parts that are rows, in a type that says columns."""
    return replace(sharded, shards=(take(sharded.whole, 0, 0, 2), take(sharded.whole, 0, 2, 3)))


MUTANTS = {
    "cut within 16 columns": (lambda stored: parameter(stored, 40), "a multiple of 16"),
    "stored as its values": (
        lambda stored: _in_format(parameter(stored, 48), None),
        "the format of its tensors",
    ),
    "scales of other groups": (
        lambda stored: _in_format(parameter(stored, 48), Format.grouped(stored.kind, F32, 32)),
        "the format of its tensors",
    ),
    "offsets left out, or too many": (
        lambda stored: _in_format(
            parameter(stored, 48), Format.grouped(stored.kind, F32, 64, offsets=not stored.offsets)
        ),
        "the format of its tensors",
    ),
    "scales of the neighbour": (
        lambda stored: replace(parameter(stored, 48), shards=parameter(stored, 48).shards[::-1]),
        "assigns to this rank",
    ),
    "scales of another group": (
        lambda stored: replace(parameter(stored, 48), shards=parameter(stored, 64).shards),
        "shape",
    ),
    "scales of another weight": (
        lambda stored: replace(
            parameter(stored, 48), shards=parameter(stored, 48, name="v").shards
        ),
        "assigns to this rank",
    ),
    "scales along the other dimension": (lambda stored: _by_rows(parameter(stored, 48)), "shape"),
    "a vector": (
        lambda stored: Parameter.replicated(Tensor("w", (64,), stored), F32, 1),
        "a matrix",
    ),
}


@pytest.mark.parametrize("stored", FORMS, ids=str)
@pytest.mark.parametrize("name", MUTANTS)
def test_parameters_that_the_checker_refuses(name: str, stored: Format) -> None:
    """Components follow from the recipe of their weight, so its rules hold for all of them."""
    change, message = MUTANTS[name]
    mutant = change(stored)
    with pytest.raises(RuleError, match=message):
        check_parameter(mutant, len(mutant.shards))


def test_dtypes_are_named_once() -> None:
    assert {DType.of(dtype).word: dtype for dtype in DTYPES.values()} == DTYPES
