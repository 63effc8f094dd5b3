"""Types are read back as they are written, and wrong ones are refused."""

from __future__ import annotations

import pytest
import torch

from tpcompile.errors import UsageError
from tpcompile.ir.layout import FusedLayout, Layout, TokenLayout, even_runs
from tpcompile.ir.roles import CacheOf, Interleaved, QueriesOf, SpansOf
from tpcompile.ir.text import format_type
from tpcompile.ir.text.layouts import LayoutNames
from tpcompile.ir.text.scanner import Scanner
from tpcompile.ir.text.types import TypeParser
from tpcompile.ir.types import DISJOINT, PARTIAL, REPLICATE, AnyType, Shard, SymbolType, ValueType

HEADS = Layout("q_heads", 3, 4, even_runs(3, 2))
KEYS = Layout("kv_heads", 1, 4, (((0, 1),), ((0, 1),)))
LAYOUTS = {"q_heads": HEADS.with_grain(1), "kv_heads": KEYS.with_grain(1)}
BF16 = torch.bfloat16


def parsed(text: str) -> AnyType:
    line = Scanner(5, text)
    kind = TypeParser(LAYOUTS, 2).any(line)
    line.expect_end()
    return kind


@pytest.mark.parametrize(
    "kind",
    [
        SymbolType("T"),
        ValueType((), torch.float32),
        ValueType(("T", 8), BF16, REPLICATE),
        ValueType(("T", 8), torch.int64, PARTIAL),
        ValueType(("T", 8), BF16, DISJOINT),
        ValueType(("T", 12), BF16, Shard(1, HEADS)),
        ValueType(("T", 6), BF16, Shard(1, HEADS.with_grain(2))),
        ValueType(("T", 16), BF16, Shard(1, FusedLayout((HEADS, KEYS)))),
        ValueType(("T", 14), BF16, Shard(1, FusedLayout((HEADS, KEYS.with_grain(2))))),
        ValueType(("T", 8), BF16, Shard(0, TokenLayout(2, "T"))),
        ValueType(("T", 8), BF16, Shard(0, TokenLayout(4, "T"))),
        (ValueType(("T", 8), BF16), ValueType((3,), torch.float32)),
        ValueType((2, "S", 4), BF16, REPLICATE, CacheOf(16)),
        ValueType(("T", 3, 4), BF16, REPLICATE, QueriesOf(1, 16)),
        ValueType(("T", 3, 4), torch.float32, REPLICATE, SpansOf("values", 1, 16, 4)),
        ValueType(("T", 3), torch.float32, REPLICATE, SpansOf("lse", 1, 16, 4)),
        ValueType((12, 8), BF16, REPLICATE, Interleaved(((8, 4), (4, 4)))),
    ],
    ids=str,
)
def test_both_ways(kind: AnyType) -> None:
    names = LayoutNames()
    names.add(LAYOUTS.values())
    assert parsed(format_type(kind, names=names)) == kind


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f33[T] Replicate", "f33 is not a dtype"),
        ("nn[T] Replicate", "nn is not a dtype"),
        ("f32[T, 12] Shard(2, q_heads)", "no such dimension"),
        ("f32[T, 12] Shard(1, ffn)", "no layout ffn"),
        ("f32[T, 13] Shard(1, q_heads)", "does not fit an extent of 13"),
        ("f32[T, 12] Shard(1, q_heads)", "do not agree with each other"),
        ("f32[T, 012] Replicate", "not valid"),
        ("f32[T 8] Replicate", "not valid"),
        ("(f32[T] Replicate", "not valid"),
        ("int 8", "not valid"),
        ("f32[T] Replicate cache(block=)", "not valid"),
        ("f32[T] Replicate interleaved(8 by)", "not valid"),
    ],
)
def test_wrong_types_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        parsed(text)
    assert error.value.where.startswith("line 5, column ")
