"""Products of many tokens: near the exact ones, and those of a token do not depend on others."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backends.native.many_tokens import NEEDS, TOKENS, near, random, random_weight
from tpcompile.backends.native import build, functions, many, products
from tpcompile.backends.torch_tp import functions as torchs
from tpcompile.ir.format import Format

pytestmark = NEEDS


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("shape", [(1, 32), (47, 64), (100, 608), (352, 224)])
@pytest.mark.parametrize("biased", [False, True])
def test_linears(tokens: int, shape: tuple[int, int], biased: bool) -> None:
    weight, bias = random(*shape), random(shape[0]) if biased else None
    x = random(tokens, shape[1] + 32)[:, 32:]
    assert products.takes_product(x, weight, bias)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    actual = products.linear(x, weight, bias)
    size = x.double().abs() @ weight.double().abs().T
    allowed = 2**-8 * exact.abs() + 2**-16 * size + (0 if bias is None else 2**-16)
    assert bool(((actual.double() - exact).abs() <= allowed).all())
    for first in range(0, tokens, 7):  # a token's products do not depend on others
        part = products.linear(x[first : first + 7], weight, bias)
        assert torch.equal(part, actual[first:][:7])


def peak_bytes() -> int:
    """Return the most memory that this process has had since the last call."""
    (held,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    Path("/proc/self/clear_refs").write_text("5")
    return int(held) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="needs the peak of /proc")
def test_products_of_many_tokens_reuse_their_memory() -> None:
    """A thread needs 200 to 300 KB; it once took them again for each of 1,376 items."""
    x, weight = random(2048, 1024), random(4096, 1024)
    peak_bytes()
    before = peak_bytes()
    out = products.linear(x, weight, None)
    packed = 4 * x.numel()
    assert peak_bytes() - before < out.numel() * out.itemsize + packed + (32 << 20)


@pytest.mark.parametrize("threads", [1, 2, 3, 16, 200])
def test_every_thread_has_items(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    product = products.Product.of(random(100, 64), few_bits(4, CUTS[0], False, 1024, 64), 128)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    path = many.PATHS[many.chosen_path()]
    assert product.part_rows % path.together == 0
    assert product.part_rows in (path.rows, path.together) or product.items(100) >= 2 * threads


Cut = tuple[int, int, bool, torch.dtype]
CUTS: list[Cut] = [
    (64, 0, False, torch.bfloat16),
    (48, 80, True, torch.float16),
    (0, 32, True, torch.float32),
    (256, 112, False, torch.float32),
]
"""Columns of a group, the first column, whether there are offsets, and the dtype of scales."""


def few_bits(bits: int, cut: Cut, rounds: bool, rows: int = 101, width: int = 160) -> Any:
    """Return a random weight. Its rows fill no blocks, and may begin and end within groups."""
    columns, first, offsets, scales = cut
    make = Format.int4 if bits == 4 else Format.int8
    return random_weight(
        make(scales, columns, offsets=offsets).rounding(rounds), first, rows, width
    )


@pytest.mark.parametrize("tokens", [1, 65, 200])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("rounds", [False, True])
def test_products_with_weights_of_few_bits(tokens: int, bits: int, cut: Cut, rounds: bool) -> None:
    weight = few_bits(bits, cut, rounds, width=608)
    x, bias = random(tokens, 608), random(101)
    assert products.takes_product(x, weight, bias)
    actual = functions.linear(x, weight, bias)
    near(actual, torchs.linear(x, weight.decoded(torch.bfloat16), bias))


@pytest.mark.parametrize("tokens", [1, 65, 200])
@pytest.mark.parametrize("first", [0, 16, 272])
@pytest.mark.parametrize(
    "word",
    [
        *("int4:32:f16min", "int5:32:f16", "int5:32:f16min", "int5:64:bf16:offsets"),
        *("int4:32:supermin", "int5:32:supermin", "int6:16:super", "int6:row:f32"),
        *("fp8:128:f32", "fp8:32:bf16", "fp8:row:f32"),
        *("int4:32:supermin:a8", "int5:32:f16min:a8", "int5:64:bf16:offsets:a8"),
        *("int6:16:super:a8", "int6:row:f32:a8"),
    ],
)
def test_products_with_weights_of_blocks(word: str, first: int, tokens: int) -> None:
    """Rows may begin within groups, superblocks, and words of high bits."""
    weight = random_weight(Format.parsed(word), first, 101, 320)
    x, bias = random(tokens, 320), random(101)
    assert products.takes_product(x, weight, bias)
    actual = functions.linear(x, weight, bias)
    near(actual, torchs.linear(x, weight.decoded(torch.bfloat16), bias))


@pytest.mark.parametrize("bits", [4, 8])
def test_products_of_rounded_tokens_are_exact_within_blocks(bits: int) -> None:
    """Integers at the ends of their range, also of other signs; no sum of a block overflows."""
    weight = few_bits(bits, (0, 0, False, torch.float32), True, 64, 128)
    values, scales = weight.parts
    values.random_(*((-(2**31), 2**31) if bits == 4 else (-128, -125)))
    scales.fill_(1)
    x = torch.randint(-1, 2, (70, 128)).bfloat16() * 127
    x[0], x[1] = 127, -127
    named = {"_packed" if bits == 4 else "": values, "_scale": scales}
    exact = x.double() @ weight.format.decoded(named, weight.columns, torch.float64).T
    actual = functions.linear(x, weight, None)
    assert torch.equal(actual, exact.float().bfloat16())


def test_a_rounded_token_depends_on_no_other() -> None:
    weight = few_bits(8, CUTS[0], True)
    x = random(130, 160)
    x[3], x[4, 70], x[5, :64] = 0, torch.nan, 1e-42
    x[6, 100] = torch.inf
    actual = functions.linear(x, weight, None)
    assert actual[4].isnan().all() and actual[6].isnan().all()
    assert actual[[3]].eq(0).all() and actual[[0, 1, 2, 5, 7]].isfinite().all()
    for first in range(0, 130, 9):
        part = functions.linear(x[first : first + 9], weight, None)
        assert torch.equal(part.nan_to_num(7), actual[first : first + 9].nan_to_num(7))


def test_rounding_blocks_with_several_scales_are_torchs() -> None:
    weight = few_bits(8, (160, 0, False, torch.float32), True, width=320)
    x = random(3, 320)
    assert not products.takes_product(x, weight, None)
    assert torch.equal(
        functions.linear(x, weight), torchs.linear(x, weight.decoded(torch.bfloat16))
    )


@pytest.mark.parametrize("word", ["int4:64:bf16:a8", "int5:32:f16min:a8", "int6:16:super:a8"])
def test_products_of_rounded_tokens_are_equal_on_all_paths(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of a block are exact, and blocks are added in one order."""
    weight, x = random_weight(Format.parsed(word), 16, 101, 320), random(70, 320)
    actual = functions.linear(x, weight, None)
    slowest = [path for path in build.paths() if path in many.PATHS][-1]
    monkeypatch.setattr(many, "_path", lambda: slowest)
    assert torch.equal(functions.linear(x, weight, None), actual)


@pytest.mark.parametrize("tokens", [1, 65, 200])
@pytest.mark.parametrize("word", ["bf16", "int4:64:bf16", "int5:32:supermin", "int8:64:f16:a8"])
@pytest.mark.parametrize("rows", [2, 202, 608])
def test_swiglu_of_a_product_is_that_of_its_halves(rows: int, word: str, tokens: int) -> None:
    stored = Format.parsed(word)
    weight = random(rows, 320) if stored.plain else random_weight(stored, 16, rows, 320)
    x = random(tokens, 320)
    for bias in (None, random(rows)):
        gate, up = products.linear(x, weight, bias).chunk(2, -1)
        expected = functions.swiglu(gate, up)
        assert torch.equal(products.linear(x, weight, bias, swiglu=True), expected)
