"""Tests of value types: the ranks' parts, invalid types, and text."""

from __future__ import annotations

import pytest
import torch

from tpcompile.ir.dtypes import dtype_name
from tpcompile.ir.layout import FusedLayout, Layout, TokenLayout, even_runs
from tpcompile.ir.types import PARTIAL, REPLICATE, Placement, Shard, SymbolType, ValueType

HEADS = Layout("q_heads", 6, 4, even_runs(6, 4))
FUSED = FusedLayout((HEADS, Layout("kv", 2, 4, (((0, 1),),) * 2 + (((1, 2),),) * 2)))
X = ValueType(("T", 24), torch.float32)


def test_local_shapes() -> None:
    assert X.local_shape(3) == ("T", 24)
    assert X.placed(PARTIAL).local_shape(3) == ("T", 24)
    assert [X.sharded(1, HEADS).local_shape(rank)[1] for rank in range(4)] == [8, 8, 4, 4]
    assert X.sharded(0, TokenLayout(4)).local_shape(0) == ("T/4", 24)
    fused = ValueType(("T", 32), torch.float32).sharded(-1, FUSED)
    assert [fused.local_shape(rank)[1] for rank in range(4)] == [12, 12, 8, 8]


def test_layouts_by_dimension() -> None:
    split = X.sharded(-1, HEADS)
    assert split.placement == Shard(1, HEADS)
    assert split.layout_of(1) is split.layout_of(-1) is HEADS
    assert split.layout_of(0) is None
    assert X.layout_of(1) is None and X.placed(PARTIAL).layout_of(1) is None


@pytest.mark.parametrize(
    ("placement", "reason"),
    [
        (REPLICATE, None),
        (PARTIAL, None),
        (Shard(1, HEADS), None),
        (Shard(0, TokenLayout(2)), None),
        (Shard(2, HEADS), "dimension 2 of a value with 2 dimensions"),
        (Shard(-1, HEADS), "dimension -1 of a value with 2 dimensions"),
        (Shard(0, HEADS), "layout q_heads spans 24, dimension 0 spans T"),
        (Shard(1, HEADS.with_grain(2)), "layout q_heads spans 12, dimension 1 spans 24"),
        (Shard(1, TokenLayout(2)), "dim 1 is not the token axis"),
        (Shard(0, TokenLayout(2, "R")), "dim 0 is not the token axis"),
        (Shard(1, Layout("a", 24, 1, (((0, 20),),))), "no rank holds a unit 20 (4 missing)"),
    ],
)
def test_refusals(placement: Placement, reason: str | None) -> None:
    assert X.placed(placement).refusal() == reason


def test_types_are_values() -> None:
    """Equal types are equal keys, and different types are different keys."""
    same = ValueType(("T", 24), torch.float32).sharded(1, Layout("q_heads", 6, 4, even_runs(6, 4)))
    assert same == X.sharded(1, HEADS) and hash(same) == hash(X.sharded(1, HEADS))
    kinds = [X, X.placed(PARTIAL), X.sharded(1, HEADS), X.sharded(0, TokenLayout(4))]
    assert len({*kinds, same}) == len(kinds)


def test_how_they_read() -> None:
    assert str(X) == "f32[T, 24] Replicate"
    assert str(X.placed(PARTIAL)) == "f32[T, 24] Partial(sum)"
    assert str(X.sharded(1, HEADS)) == "f32[T, 24] Shard(1, q_heads)"
    assert str(ValueType(("T", 32), torch.bfloat16).sharded(1, FUSED)) == (
        "bf16[T, 32] Shard(1, q_heads+kv)"
    )
    assert str(SymbolType("T")) == "int T"
    names = [dtype_name(d) for d in (torch.float16, torch.int64, torch.bool, torch.float8_e5m2)]
    assert names == ["f16", "i64", "i1", "float8_e5m2"]
