"""Kernels for many tokens: they equal the dialect's references, and cuts of a prompt change no bit.

The references are torch's, which round at the same places. They may add in another order, and
torch's attention rounds at other places within its sums, so the results are compared within the
rounding of bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import tpcompile
from tests.backends.native.many_tokens import NEEDS, TOKENS, near, random
from tpcompile.backends.native import functions, many, products, prompts
from tpcompile.backends.torch_tp import functions as torchs
from tpcompile.ir.format import Format
from tpcompile.ir.kv import ROUNDED, loaded_rows, nan_element, row_in_memory, stored_rows
from tpcompile.ir.ops import pointwise

pytestmark = NEEDS

BLOCK = 16
SLOTS = 64 * BLOCK


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("width", [16, 24, 100, 1024])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_norms(tokens: int, width: int, zero_centered: bool) -> None:
    x, weight = random(tokens, width + 8)[:, :width], random(width)
    heads = random(tokens, 5 * width).split((2 * width, 3 * width), 1)[1].unflatten(1, (-1, width))
    for tensor in (x, heads):
        near(
            functions.rms_norm(tensor, weight, 1e-6, zero_centered),
            torchs.rms_norm(tensor, weight, 1e-6, zero_centered),
        )
    whole = x.contiguous()
    for residual in (random(tokens, width), torch.randn(tokens, width)):
        actual = functions.add_rms_norm(whole, residual, weight, 1e-6, zero_centered)
        normed, total = torchs.add_rms_norm(whole, residual, weight, 1e-6, zero_centered)
        near(actual[0], normed)
        assert torch.equal(actual[1], total)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("width", [16, 44, 352])
def test_swiglu_and_rope(tokens: int, width: int) -> None:
    gate, up = (8 * random(tokens, 2 * width)).split((width, width), 1)
    near(functions.swiglu(gate, up), torchs.swiglu(gate, up))
    x = random(tokens, 3 * width).unflatten(1, (-1, width))[:, 1:]
    for rotated in (width, width // 2):
        cos, sin = random(2, tokens, rotated)
        assert torch.equal(functions.rope(x, cos, sin), torchs.rope(x, cos, sin))


def test_values_at_the_ends_of_the_range() -> None:
    gate = torch.tensor([[-3e38, -100.0, -0.0, 0.0, 100.0, 3e38, float("inf"), float("nan")] * 3])
    gate, up = gate.bfloat16(), torch.ones(1, 24).bfloat16()
    actual, expected = functions.swiglu(gate, up), torchs.swiglu(gate, up)
    assert torch.equal(actual.nan_to_num(7), expected.nan_to_num(7))


class Case:
    """New tokens of sequences, in blocks in random order; other blocks contain NaN."""

    def __init__(
        self,
        sizes: Sequence[tuple[int, int]],
        heads: int,
        shared: int,
        width: int,
        kv: Format | None = None,
    ) -> None:
        new = torch.tensor([0, *(added for _, added in sizes)])
        self.starts = new.cumsum(0)
        tokens = int(self.starts[-1])
        self.q = random(tokens, heads * width).unflatten(1, (-1, width))
        self.k, self.v = random(2, tokens, shared, width)
        row, dtype = row_in_memory(width, torch.bfloat16, kv)
        self.cache = torch.empty(3, 2, SLOTS, shared, row, dtype=dtype)
        self.cache.fill_(nan_element(self.cache))
        self.lengths = torch.tensor([length for length, _ in sizes])
        order = torch.randperm(SLOTS // BLOCK).tolist()
        most = max(-(-length // BLOCK) for length, _ in sizes)
        self.tables = torch.full((len(sizes), most), -1)
        self.slots = torch.empty(tokens, dtype=torch.long)
        for row, (length, added) in enumerate(sizes):
            held = torch.tensor([order.pop() for _ in range(-(-length // BLOCK))])
            self.tables[row, : len(held)] = held
            places = torch.arange(length)
            slots = held[places // BLOCK] * BLOCK + places % BLOCK
            self.cache[1, :, slots] = stored_rows(random(2, length, shared, width), self.cache)
            self.slots[self.starts[row] : self.starts[row + 1]] = slots[length - added :]

    def run(self, how: Any, window: int | None = None, heads: Sequence[int] | None = None) -> Any:
        """Return the result, and the cache that it leaves."""
        cache = self.cache.clone()
        values = how.paged_attention(
            *(self.q, self.k, self.v, cache, self.starts, self.slots, self.tables, self.lengths),
            *(0.1, window, 1, BLOCK, heads),
        )
        return values, cache


SIZES = [[(1, 1)], [(128, 128)], [(70, 70), (65, 1), (200, 131)], [(300, 33), (64, 64), (5, 0)]]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("heads", "shared", "width"), [(4, 2, 32), (6, 1, 96), (3, 3, 128)])
@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize("kv", [None, ROUNDED])
def test_attention(
    sizes: list[tuple[int, int]],
    heads: int,
    shared: int,
    width: int,
    window: int | None,
    kv: Format | None,
) -> None:
    case = Case(sizes, heads, shared, width, kv)
    assert prompts.takes_heads(case.q, case.k, case.v, case.cache)
    (actual, cache), (expected, torchs_cache) = (
        case.run(implementation, window) for implementation in (functions, torchs)
    )
    near(actual, expected, 3)
    assert torch.equal(cache.nan_to_num(7), torchs_cache.nan_to_num(7))


def test_attention_of_heads_that_are_shared_unevenly() -> None:
    case, heads = Case([(90, 40), (33, 33)], 5, 3, 64), [0, 0, 0, 1, 2]
    near(case.run(functions, heads=heads)[0], case.run(torchs, heads=heads)[0], 3)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("kv", [None, ROUNDED])
def test_attention_does_not_depend_on_cuts_nor_on_neighbours(
    window: int | None, kv: Format | None
) -> None:
    case = Case([(200, 170), (90, 90)], 4, 2, 32, kv)
    whole = case.run(functions, window)[0]
    parts = []
    for first, last in ((0, 1), (1, 34), (34, 128), (128, 170)):
        parts.append(
            functions.paged_attention(
                *(case.q[first:last], case.k[first:last], case.v[first:last], case.cache),
                *(torch.tensor([0, last - first]), case.slots[first:last], case.tables[:1]),
                *(torch.tensor([30 + last]), 0.1, window, 1, BLOCK),
            )
        )
    assert torch.equal(torch.cat(parts), whole[:170])


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("kv", [None, ROUNDED])
def test_attention_does_not_depend_on_the_tokens_of_a_part(
    window: int | None, kv: Format | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case([(300, 290), (97, 97)], 4, 2, 32, kv)
    whole = case.run(functions, window)[0]
    for part in (20, 64, 96):
        monkeypatch.setattr(prompts, "_part_tokens", lambda *_, part=part: part)
        assert torch.equal(case.run(functions, window)[0], whole)


def test_long_prompts_have_long_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    of_prompts = [prompts._part_tokens(2 * tokens, tokens) for tokens in (9, 1024, 2048, 4096)]
    assert of_prompts == [32, 32, 64, 96]
    assert prompts._part_tokens(2 * 128, 4096) == 32  # other threads would have no item


def wrong_slot(case: Case) -> None:
    case.slots[3] = SLOTS


def wrong_block(case: Case) -> None:
    case.tables[0, 1] = SLOTS // BLOCK


def short_table(case: Case) -> None:
    case.lengths[0] = 1000


def short_sequence(case: Case) -> None:
    case.lengths[0] = 3


def test_rows_that_are_not_finite_are_stored_as_nan() -> None:
    case = Case([(40, 20), (20, 20)], 2, 1, 32, ROUNDED)
    case.k[3, 0, 5], case.v[25, 0, 1] = torch.nan, torch.inf
    (actual, cache), (_, expected) = case.run(functions), case.run(torchs)
    rows, wanted = (loaded_rows(held[1]).nan_to_num(7) for held in (cache, expected))
    assert torch.equal(rows, wanted)
    assert actual[3:20].isnan().all() and actual[25:].isnan().all()
    assert actual[:3].isfinite().all()


@pytest.mark.parametrize("break_it", [wrong_slot, wrong_block, short_table, short_sequence])
@pytest.mark.parametrize("kv", [None, ROUNDED])
def test_addresses_outside_the_cache_are_refused(
    break_it: Callable[[Case], None], kv: Format | None
) -> None:
    case = Case([(40, 20)], 2, 1, 32, kv)
    break_it(case)
    with pytest.raises(ValueError, match=r"slots must be|blocks must contain|must contain its 20"):
        case.run(functions)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_argmax(dtype: torch.dtype) -> None:
    """Among equal logits the first wins, and NaN wins over any number, as in torch."""
    logits = torch.randint(-9, 9, (7, 300)).to(dtype)
    logits[0], logits[1, 4:] = -torch.inf, torch.inf
    logits[2, (5, 8)] = torch.nan
    values, ids = functions.local_argmax(logits, 1000)
    expected = torchs.local_argmax(logits, 1000)
    assert torch.equal(functions.argmax(logits), expected[1] - 1000)
    assert torch.equal(ids, expected[1])
    assert torch.equal(values.nan_to_num(7), expected[0].nan_to_num(7))
    empty = functions.local_argmax(logits[:, :0], 5)
    assert torch.equal(empty[1], torchs.local_argmax(logits[:, :0], 5)[1])


def test_other_dtypes_and_widths_run_without_kernels() -> None:
    x = torch.randn(4, 2, 16)
    assert not many.takes(x)
    assert not prompts.takes_heads(*[x.bfloat16()] * 4)
    gate = torch.randn(4, 32)
    assert torch.equal(functions.swiglu(gate, gate), pointwise.silu(gate) * gate)
    torch.testing.assert_close(functions.swiglu(gate, gate), torchs.swiglu(gate, gate))


def test_a_model_uses_them_for_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def record(module: Any, name: str) -> None:
        real = getattr(module, name)

        def recording(*args: Any, **options: Any) -> Any:
            ran.append(name)
            return real(*args, **options)

        monkeypatch.setattr(module, name, recording)

    for name in ("norm", "add_norm", "swiglu", "rope"):
        record(prompts, name)
    record(products, "linear")  # with the SwiGLU, where it is faster than torch's
    tokens = torch.arange(1, 40)[None]
    logits = []
    for backend in ("native", "torch"):
        with tpcompile.compile(
            "preset:tiny-qwen3", random_weights=1, dtype=torch.bfloat16, backend=backend
        ) as model:
            logits.append(model(tokens).logits)
        if backend == "native":
            used = set(ran)
            ran.clear()
    last = "linear" if many.PATHS[many.chosen_path()].faster else "swiglu"
    assert used == {"norm", "add_norm", "rope", last} and not ran
    near(*logits, steps=8)
