"""The op from residual to rotated queries gives the bits of separate ops and fills the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.ir.ranks import Operand, deal, infer, operand, random, refused
from tpcompile.ir.layout import FusedLayout, Layout, even_runs
from tpcompile.ir.ops import (
    LINEAR,
    NORM_Q_K_V_ROPE_APPEND,
    NORM_QKV_ROPE_APPEND,
    RMS_NORM,
    ROPE,
    SPECS,
)
from tpcompile.ir.ops.collectives import to_whole
from tpcompile.ir.plan import plan_heads
from tpcompile.ir.roles import CacheOf
from tpcompile.ir.types import Shard, ValueType

TOKENS, HIDDEN, WIDTH, EPS, HEAD_EPS = 3, 10, 8, 1e-6, 1e-3
LAYERS, LAYER, SLOTS = 2, 1, 8
NAMES = SPECS[NORM_QKV_ROPE_APPEND].argument_names
APART = SPECS[NORM_Q_K_V_ROPE_APPEND].argument_names
PLACES = operand(torch.tensor([6, 0, 3]))


def given(heads: Sequence[int] = (4, 2, 2), **changes: Any) -> dict[str, Any]:
    """Return operands by name, including a bias and per-head norms."""
    rows = sum(heads) * WIDTH
    cache = torch.full((LAYERS, 2, SLOTS, heads[1], WIDTH), torch.nan)
    operands = {
        "x": random(TOKENS, HIDDEN),
        "norm": random(HIDDEN, seed=1),
        "eps": EPS,
        "weight": random(rows, HIDDEN, seed=2),
        "bias": random(rows, seed=3),
        "q_norm": random(WIDTH, seed=4),
        "k_norm": random(WIDTH, seed=5),
        "head_eps": HEAD_EPS,
        "cos": random(TOKENS, WIDTH, seed=6),
        "sin": random(TOKENS, WIDTH, seed=7),
        "cache": operand(cache).in_role(CacheOf(2)),
        "slots": PLACES,
        "layer": LAYER,
        "block": 2,
        "heads": tuple(heads),
        "interleaved": False,
        "zero_centered": False,
    }
    return {**operands, **changes}


def called(values: dict[str, Any]) -> torch.Tensor:
    plain = [getattr(value, "whole", value) for value in values.values()]
    queries: torch.Tensor = NORM_QKV_ROPE_APPEND(*plain)
    return queries


def by_hand(values: dict[str, Any]) -> list[torch.Tensor]:
    """Compute queries, keys and values op by op."""
    tensors = {name: getattr(value, "whole", value) for name, value in values.items()}
    centred = tensors["zero_centered"]
    normed = RMS_NORM(tensors["x"], tensors["norm"], tensors["eps"], centred)
    rows = LINEAR(normed, tensors["weight"], tensors["bias"])
    sizes = [count * WIDTH for count in tensors["heads"]]
    sides = [side.unflatten(-1, (-1, WIDTH)) for side in torch.split(rows, sizes, -1)]
    for place, name in enumerate(("q_norm", "k_norm")):
        if tensors[name] is not None:
            sides[place] = RMS_NORM(sides[place], tensors[name], tensors["head_eps"], centred)
        sides[place] = ROPE(sides[place], tensors["cos"], tensors["sin"], tensors["interleaved"])
    return sides


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("left_out", [(), ("bias",), ("q_norm", "k_norm"), ("k_norm",)], ids=str)
@pytest.mark.parametrize("heads", [(4, 2, 2), (3, 3, 3), (5, 1, 1)], ids=str)
def test_the_same_bits_as_op_by_op(
    heads: tuple[int, ...], left_out: tuple[str, ...], interleaved: bool, zero_centered: bool
) -> None:
    """Traps 5, 7 and 9: biases and per-head norms are applied; each key is cached once, rotated."""
    options = {"interleaved": interleaved, "zero_centered": zero_centered}
    values = given(heads, **dict.fromkeys(left_out), **options)
    q, k, v = by_hand(values)
    cache = values["cache"].whole
    assert torch.equal(called(values), q)
    slots = PLACES.whole
    assert torch.equal(cache[LAYER, 0, slots], k)
    assert torch.equal(cache[LAYER, 1, slots], v)
    other_slots = [slot for slot in range(SLOTS) if slot not in slots.tolist()]
    assert bool(cache[LAYER][:, other_slots].isnan().all()) and bool(cache[1 - LAYER].isnan().all())


@pytest.mark.parametrize("name", ["bias", "q_norm", "k_norm", "norm", "eps", "head_eps", "cos"])
def test_every_operand_counts(name: str) -> None:
    """Traps 5 and 23: no operand is ignored, and the two epsilons are separate."""
    values = given()
    changed = {**given(), name: 0.5 if "eps" in name else random(*_shape(values, name), seed=50)}
    before, after = called(values), called(changed)
    cached = [side["cache"].whole[LAYER][:, PLACES.whole] for side in (values, changed)]
    assert not (torch.equal(before, after) and torch.equal(*cached))


def test_the_layout_of_pairs_counts() -> None:
    """The pair layout affects queries and cached keys, but not values."""
    values, changed = given(), given(interleaved=True)
    queries = [called(operands) for operands in (values, changed)]
    keys, v = zip(
        *(e["cache"].whole[LAYER][:, PLACES.whole] for e in (values, changed)), strict=True
    )
    assert not torch.equal(*queries) and not torch.equal(*keys)
    assert torch.equal(*v)


def test_a_tracer_sees_its_shape_without_options_too() -> None:
    values = [getattr(value, "whole", value) for value in given().values()]
    empty = [torch.empty_like(v, device="meta") if torch.is_tensor(v) else v for v in values]
    for operands, named in ((empty, {}), (empty[:-2], {}), (empty[:-2], {"interleaved": True})):
        assert NORM_QKV_ROPE_APPEND(*operands, **named).shape == (TOKENS, 4, WIDTH)


def _shape(values: dict[str, Any], name: str) -> Sequence[int]:
    shape: Sequence[int] = values[name].whole.shape
    return shape


@pytest.mark.parametrize(("queries", "keys"), [(6, 2), (14, 2), (8, 4), (5, 5)])
@pytest.mark.parametrize("plain", [False, True])
def test_every_tp_of_the_plan_is_sound(queries: int, keys: int, plain: bool) -> None:
    """Ranks compute their query heads and cache their KV heads, uneven and shared ones too."""
    left_out = dict.fromkeys(("bias", "q_norm", "k_norm") if plain else ())
    whole = given((queries, keys, keys), **left_out)
    q, k, v = by_hand(whole)
    for tp in range(1, queries + 1):
        values = split(whole, tp)
        kinds = [value.kind if isinstance(value, Operand) else value for value in values.values()]
        spec = SPECS[NORM_QKV_ROPE_APPEND]
        kind = infer(NORM_QKV_ROPE_APPEND, *values.values())
        assert isinstance(kind, ValueType)
        assert kind.placement == Shard(1, plan_heads(queries, keys, tp).queries)
        dealt = {n: deal(o, tp) for n, o in values.items() if isinstance(o, Operand)}
        assert spec.localize is not None
        outputs = []
        for rank in range(tp):
            local = {**values, **{name: parts[rank] for name, parts in dealt.items()}}
            local |= spec.localize(kind, rank, **dict(zip(NAMES, kinds, strict=True)))
            outputs.append(NORM_QKV_ROPE_APPEND(*local.values()))
            assert outputs[-1].shape == (TOKENS, *kind.local_shape(rank)[1:])
        torch.testing.assert_close(to_whole(outputs, kind), q, rtol=1e-5, atol=1e-5)
        cached = to_whole(dealt["cache"], values["cache"].kind)[LAYER][:, PLACES.whole]
        torch.testing.assert_close(cached, torch.stack([k, v]), rtol=1e-5, atol=1e-5)


def apart(values: dict[str, Any]) -> dict[str, Any]:
    """Return the operands of the op with a weight each for queries, keys and values."""
    operands = dict(values)
    sizes = [count * WIDTH for count in operands.pop("heads")]
    for name in ("weight", "bias"):
        whole = operands.pop(name)
        parts = [None] * 3 if whole is None else map(operand, whole.whole.split(sizes))
        operands |= {f"{part}_{name}": rows for part, rows in zip("qkv", parts, strict=True)}
    return {name: operands[name] for name in APART}


@pytest.mark.parametrize("left_out", [(), ("bias",), ("q_norm", "k_norm")], ids=str)
@pytest.mark.parametrize("heads", [(4, 2, 2), (3, 3, 3), (5, 1, 1)], ids=str)
def test_a_weight_each(heads: tuple[int, ...], left_out: tuple[str, ...]) -> None:
    """Results, the cache, the type and the cost are those of the op with one weight."""
    joined = given(heads, **dict.fromkeys(left_out))
    values = apart(given(heads, **dict.fromkeys(left_out)))
    plain = [getattr(value, "whole", value) for value in values.values()]
    torch.testing.assert_close(NORM_Q_K_V_ROPE_APPEND(*plain), called(joined))
    cached = [operands["cache"].whole[LAYER][:, PLACES.whole] for operands in (joined, values)]
    torch.testing.assert_close(*cached)
    kinds = [
        infer(target, *operands.values())
        for target, operands in ((NORM_QKV_ROPE_APPEND, joined), (NORM_Q_K_V_ROPE_APPEND, values))
    ]
    assert kinds[0] == kinds[1]
    costs = [
        SPECS[target].cost(kind, [o.kind for o in operands.values() if isinstance(o, Operand)], 0)
        for target, operands, kind in (
            (NORM_QKV_ROPE_APPEND, joined, kinds[0]),
            (NORM_Q_K_V_ROPE_APPEND, values, kinds[1]),
        )
    ]
    assert costs[0] == costs[1]


@pytest.mark.parametrize("part", "qkv")
def test_one_part_alone_may_have_a_bias(part: str) -> None:
    values = apart(given())
    wanted = given()
    zeros = [operand(torch.zeros_like(values[f"{other}_bias"].whole)) for other in "qkv"]
    biases = {
        other: values[f"{other}_bias"] if other == part else zero
        for other, zero in zip("qkv", zeros, strict=True)
    }
    wanted["bias"] = operand(torch.cat([bias.whole for bias in biases.values()]))
    values |= {f"{other}_bias": None for other in "qkv" if other != part}
    plain = [getattr(value, "whole", value) for value in values.values()]
    torch.testing.assert_close(NORM_Q_K_V_ROPE_APPEND(*plain), called(wanted))
    cached = [operands["cache"].whole[LAYER][:, PLACES.whole] for operands in (wanted, values)]
    torch.testing.assert_close(*cached)


@pytest.mark.parametrize(("queries", "keys"), [(6, 2), (14, 2), (5, 5)])
def test_a_weight_each_on_every_tp(queries: int, keys: int) -> None:
    """Ranks compute the heads of the plan from their rows of each weight."""
    q, k, v = by_hand(given((queries, keys, keys)))
    for tp in range(1, queries + 1):
        plan = plan_heads(queries, keys, tp)
        values = apart(given((queries, keys, keys)))
        for part, layout in zip("qkv", (plan.queries, plan.keys, plan.keys), strict=True):
            for name in (f"{part}_weight", f"{part}_bias"):
                values[name] = values[name].sharded(0, layout.with_grain(WIDTH))
        values["cache"] = values["cache"].sharded(3, plan.keys)
        kind = infer(NORM_Q_K_V_ROPE_APPEND, *values.values())
        assert isinstance(kind, ValueType) and kind.placement == Shard(1, plan.queries)
        dealt = {n: deal(o, tp) for n, o in values.items() if isinstance(o, Operand)}
        outputs = [
            NORM_Q_K_V_ROPE_APPEND(
                *{**values, **{n: parts[rank] for n, parts in dealt.items()}}.values()
            )
            for rank in range(tp)
        ]
        torch.testing.assert_close(to_whole(outputs, kind), q, rtol=1e-5, atol=1e-5)
        cached = to_whole(dealt["cache"], values["cache"].kind)[LAYER][:, PLACES.whole]
        torch.testing.assert_close(cached, torch.stack([k, v]), rtol=1e-5, atol=1e-5)


MISMATCHES: dict[str, tuple[str, dict[str, Any]]] = {
    "more values than keys": ("kv-alike", {"v_weight": random(24, HIDDEN), "v_bias": None}),
    "part of a head": ("unflatten", {"q_weight": random(WIDTH + 1, HIDDEN), "q_bias": None}),
    "the bias of another part": ("linear-shape", {"q_bias": random(16)}),
    "keys of another input": ("linear-shape", {"k_weight": random(16, HIDDEN + 1)}),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_weight_each_refuses(name: str) -> None:
    rule, changes = MISMATCHES[name]
    refused(rule, NORM_Q_K_V_ROPE_APPEND, *{**apart(given()), **changes}.values())


def split(values: dict[str, Any], tp: int) -> dict[str, Any]:
    queries, keys, _ = values["heads"]
    plan = plan_heads(queries, keys, tp)
    fused = FusedLayout(
        tuple(layout.with_grain(WIDTH) for layout in (plan.queries, plan.keys, plan.keys))
    )
    changed = {"weight": values["weight"].sharded(0, fused)}
    if values["bias"] is not None:
        changed["bias"] = values["bias"].sharded(0, fused)
    cache = torch.full((LAYERS, 2, SLOTS, keys, WIDTH), torch.nan)
    return {**values, **changed, "cache": operand(cache).in_role(CacheOf(2)).sharded(3, plan.keys)}


def rows(grain: int, *counts: int) -> FusedLayout:
    """Return a fused layout in two parts per segment, in units that may differ from heads."""
    layouts = (Layout("rows", n * WIDTH // grain, grain, _halves(n, grain)) for n in counts)
    return FusedLayout(tuple(layouts))


def _halves(heads: int, grain: int) -> Any:
    return even_runs(heads * WIDTH // grain, 2)


KEYS = Layout("rows", 2, 1, even_runs(2, 2))
REFUSALS: dict[str, tuple[str, dict[str, Any]]] = {
    "half a head per rank": (
        "whole-heads",
        {
            "weight": given()["weight"].sharded(0, rows(WIDTH // 2, 4, 2, 2)),
            "bias": None,
        },
    ),
    "rows split without segments": (
        "split-segments",
        {
            "weight": given()["weight"].sharded(0, Layout("rows", 8, 8, even_runs(8, 2))),
            "bias": None,
        },
    ),
    "a replicated bias": (
        "bias-layout",
        {"weight": given()["weight"].sharded(0, rows(WIDTH, 4, 2, 2))},
    ),
    "a cache of all heads beside split keys": (
        "kv-cache",
        {"weight": given()["weight"].sharded(0, rows(WIDTH, 4, 2, 2)), "bias": None},
    ),
    "a cache split beside whole keys": ("kv-cache", {"cache": given()["cache"].sharded(3, KEYS)}),
    "repeated keys": ("kv-cache", {"cache": random(LAYERS, 2, SLOTS, 4, WIDTH)}),
    "a cache of another dtype": (
        "kv-cache",
        {"cache": operand(given()["cache"].whole.bfloat16())},
    ),
    "more keys than values": ("norm-qkv", {"heads": (4, 3, 1)}),
    "heads that do not cover all rows": ("split-sizes", {"heads": (3, 2, 2)}),
    "a norm of another width": ("norm-weight", {"q_norm": random(HIDDEN)}),
    "a norm of part of a head": ("norm-weight", {"k_norm": random(WIDTH // 2)}),
    "terms": ("partial-nonlinear", {"x": given()["x"].partial()}),
    "slots of other tokens": ("kv-cache", {"slots": operand(torch.tensor([6, 0]))}),
    "slots that are a mask": ("kv-cache", {"slots": operand(torch.tensor([True, False, True]))}),
    "a layer out of range": ("kv-cache", {"layer": LAYERS}),
    "empty blocks": ("kv-cache", {"block": 0}),
    "tables of another step": ("rope", {"cos": random(4, WIDTH), "sin": random(4, WIDTH)}),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses(name: str) -> None:
    """Traps 7 and 11 are among the refusals: repeated keys, and a rank with part of a head."""
    rule, changes = REFUSALS[name]
    refused(rule, NORM_QKV_ROPE_APPEND, *{**given(), **changes}.values())
