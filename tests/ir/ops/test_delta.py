"""Linear attention gives the numbers of Hugging Face, and knows the heads that belong together."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from tests.ir.ranks import Operand, operand, random, refused, run
from tests.ir.strategies import EXAMPLES, RANKS, layouts
from tests.models import relative_error
from tpcompile.ir.layout import FusedLayout, Layout, even_runs
from tpcompile.ir.ops import CAUSAL_CONV, DELTA_DECAY, GATED_DELTA_RULE, SPECS
from tpcompile.ir.ops.delta import CHUNK, delta_rule, new_state
from tpcompile.ir.plan import LINEAR_HEADS, plan_heads
from tpcompile.ir.types import ValueType

TOLERANCE = 2e-6
"""The error of the chunked form against the recurrent one, both in fp32.

It grows with the decay of a chunk, as the chunked form subtracts sums of logarithms.
"""
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
TOKENS = (1, 2, 3, 63, 64, 65, 130)


def operands(
    tokens: int, k_heads: int = 2, v_heads: int = 4, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Return q, k, v, decay and beta of random tokens."""
    generator = torch.Generator().manual_seed(tokens)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    heads = [drawn(tokens, count, 16) for count in (k_heads, k_heads)]
    values = drawn(tokens, v_heads, 8)
    decay = -0.3 * torch.rand((tokens, v_heads), generator=generator)
    beta = drawn(tokens, v_heads).sigmoid()
    return [*(tensor.to(dtype) for tensor in (*heads, values)), decay, beta.to(dtype)]


def theirs(function: Any, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results and the state of a function of Hugging Face."""
    q, k, v, decay, beta = (tensor[None] for tensor in inputs)
    out, state = function(
        q, k, v, g=decay, beta=beta, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    return out[0], state[0]


def ours(inputs: list[torch.Tensor], *cuts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return our results and the state, of tokens that come in pieces."""
    state = new_state(inputs[1], inputs[2])
    bounds = pairwise((0, *cuts, len(inputs[0])))
    out = [delta_rule(*(tensor[a:b] for tensor in inputs), state) for a, b in bounds]
    return torch.cat(out), state


# The delta rule.


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("heads", [(2, 4), (3, 3), (1, 5)], ids=str)
def test_it_is_the_chunked_and_the_recurrent_form(tokens: int, heads: tuple[int, int]) -> None:
    inputs = operands(tokens, *heads)
    outputs = ours(inputs)
    for function in (torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule):
        for actual, expected in zip(outputs, theirs(function, inputs), strict=True):
            assert relative_error(actual, expected) < TOLERANCE


@pytest.mark.parametrize("tokens", TOKENS)
def test_in_16_bits_it_is_computed_in_32(tokens: int) -> None:
    """Results are those of the wider operands, rounded once; the state is never rounded."""
    inputs = operands(tokens, dtype=torch.bfloat16)
    output, state = ours(inputs)
    wide, wide_state = ours([tensor.float() for tensor in inputs])
    assert state.dtype == torch.float32 and torch.equal(state, wide_state)
    assert output.dtype == torch.bfloat16 and torch.equal(output, wide.bfloat16())
    expected = theirs(torch_chunk_gated_delta_rule, inputs)
    assert relative_error(output.float(), expected[0].float()) < 2**-7
    assert relative_error(state, expected[1]) < TOLERANCE


@DTYPES
@pytest.mark.parametrize("cuts", [(64,), (128,), (64, 128), (192,)], ids=str)
def test_cuts_at_chunks_keep_the_bits(cuts: tuple[int, ...], dtype: torch.dtype) -> None:
    assert CHUNK == 64
    inputs = operands(201, dtype=dtype)
    for actual, expected in zip(ours(inputs, *cuts), ours(inputs), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("cuts", [(1,), (37,), (63, 64), (100,)], ids=str)
def test_cuts_elsewhere_change_bits_within_the_tolerance(cuts: tuple[int, ...]) -> None:
    inputs = operands(201)
    pieces, whole = ours(inputs, *cuts), ours(inputs)
    assert not torch.equal(pieces[0], whole[0])
    for actual, expected in zip(pieces, whole, strict=True):
        assert relative_error(actual, expected) < TOLERANCE


def test_step_by_step_is_the_prompt() -> None:
    inputs = operands(130)
    for actual, expected in zip(ours(inputs, *range(1, 130)), ours(inputs), strict=True):
        assert relative_error(actual, expected) < TOLERANCE
    recurrent = theirs(torch_recurrent_gated_delta_rule, inputs)
    for actual, expected in zip(ours(inputs, *range(1, 130)), recurrent, strict=True):
        assert relative_error(actual, expected) < TOLERANCE


def exact(inputs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results and the state of the recurrence in fp64."""
    q, k, v, decay, beta = (tensor.double() for tensor in inputs)
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    heads = v.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(heads, 1) * q.shape[-1] ** -0.5, k.repeat_interleave(heads, 1)
    state, out = new_state(k, v).double(), []
    for t in range(len(v)):
        state = state * decay[t].exp()[:, None, None]
        delta = beta[t].unsqueeze(-1) * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
        state = state + k[t].unsqueeze(-1) * delta.unsqueeze(-2)
        out.append(torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(out), state


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("scale", [0, 1, 10, 1000])
def test_the_error_is_not_above_hugging_face_s(scale: float, tokens: int) -> None:
    """A decay to almost nothing within a chunk neither overflows nor gives NaN."""
    q, k, v, decay, beta = operands(tokens, 3, 3)
    inputs = [q, k, v, scale * decay, beta]
    outputs, chunked = ours(inputs), theirs(torch_chunk_gated_delta_rule, inputs)
    for actual, reference, right in zip(outputs, chunked, exact(inputs), strict=True):
        bound = max(1.5 * relative_error(reference.double(), right), TOLERANCE / 2)
        assert relative_error(actual.double(), right) < bound


@DTYPES
def test_sequences_do_not_read_each_other(dtype: torch.dtype) -> None:
    inputs = operands(150, dtype=dtype)
    starts = torch.tensor([0, 1, 1, 70, 150])
    output = GATED_DELTA_RULE(*inputs, starts, 0)
    alone = [ours([item[a:b] for item in inputs])[0] for a, b in pairwise(starts.tolist()) if b > a]
    assert torch.equal(output, torch.cat(alone))


def test_no_tokens() -> None:
    inputs = operands(0)
    assert GATED_DELTA_RULE(*inputs, torch.tensor([0, 0]), 0).shape == (0, 4, 8)
    assert GATED_DELTA_RULE(*inputs, torch.tensor([0]), 0).shape == (0, 4, 8)


def test_a_map_of_key_heads() -> None:
    """Value heads may read key heads in any order; by default, each is shared by its run."""
    q, k, v, decay, beta = operands(70, 3, 4)
    starts = torch.tensor([0, 70])
    chosen = [2, 0, 0, 1]
    output = GATED_DELTA_RULE(q, k, v, decay, beta, starts, 0, chosen)
    expected = GATED_DELTA_RULE(q[:, chosen], k[:, chosen], v, decay, beta, starts, 0)
    assert torch.equal(output, expected)


# The convolution.


@DTYPES
@pytest.mark.parametrize("taps", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 2, 3, 9])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_convolution(tokens: int, taps: int, with_bias: bool, dtype: torch.dtype) -> None:
    """Sequences may have fewer tokens than taps. In 16 bits Hugging Face rounds before the SiLU."""
    x, weight = (
        random(tokens, 6).whole.to(dtype),
        random(6, 1, taps, seed=1).whole.to(dtype),
    )
    bias = random(6, seed=2).whole.to(dtype) if with_bias else None
    output = CAUSAL_CONV(x, weight, bias, torch.tensor([0, tokens]), 0)
    expected = causal_conv1d_fn(x.t()[None], weight.squeeze(1), bias, activation="silu")[0].t()
    near = 1e-6 if dtype == torch.float32 else 2**-6
    assert output.dtype == dtype and relative_error(output.float(), expected.float()) < near
    wide = [None if tensor is None else tensor.float() for tensor in (x, weight, bias)]
    exact = CAUSAL_CONV(*wide, torch.tensor([0, tokens]), 0)
    assert torch.equal(output, exact.to(dtype))


def test_the_convolution_does_not_read_another_sequence() -> None:
    x, weight = random(9, 6).whole, random(6, 1, 4, seed=1).whole
    starts = torch.tensor([0, 1, 3, 3, 9])
    output = CAUSAL_CONV(x, weight, None, starts, 0)
    alone = [
        CAUSAL_CONV(x[a:b], weight, None, torch.tensor([0, b - a]), 0)
        for a, b in pairwise(starts.tolist())
    ]
    assert torch.equal(output, torch.cat(alone))
    assert CAUSAL_CONV(x[:0], weight, None, torch.tensor([0, 0]), 0).shape == (0, 6)


@DTYPES
def test_the_decay_is_in_fp32(dtype: torch.dtype) -> None:
    a, rate, bias = (random(5, 4).whole, random(4, seed=1).whole, random(4, seed=2).whole)
    a, bias = a.to(dtype), bias.to(dtype)
    output = DELTA_DECAY(a, rate, bias)
    expected = -rate.float().exp() * torch.nn.functional.softplus(a.float() + bias)
    assert output.dtype == torch.float32 and torch.equal(output, expected)


# On ranks.

HEADS = plan_heads(6, 3, 2, LINEAR_HEADS)
STARTS = operand(torch.tensor([0, 3, 5]))


def sharded(
    values: Layout | None = HEADS.queries, keys: Layout | None = HEADS.keys
) -> dict[str, Operand]:
    """Return operands of 6 value heads and 3 key heads, with these layouts."""
    names = ("q", "k", "v", "decay", "beta")
    by_name = {n: operand(t) for n, t in zip(names, operands(5, 3, 6), strict=True)}
    for name, value in by_name.items():
        layout = keys if name in "qk" else values
        if layout is not None:
            by_name[name] = value.sharded(1, layout)
    return by_name


def refused_rule(rule: str, **changes: Any) -> str:
    error = refused(
        rule, GATED_DELTA_RULE, **{**sharded(), "starts": STARTS, "layer": 0, **changes}
    )
    return str(error)


@EXAMPLES
@given(st.data(), RANKS, st.integers(1, 3), st.integers(1, 3))
def test_value_heads_on_ranks(data: st.DataObject, ranks: int, shared: int, group: int) -> None:
    """Each rank has the key heads that its value heads read, or more, up to all."""
    units = shared * group
    if units < ranks:
        return
    values = data.draw(layouts(ranks, units=units, grain=1, overlapping=True))
    more = data.draw(st.sets(st.integers(0, shared - 1)))
    parts = [
        sorted({head // group for head in values.units_of(rank)} | more) for rank in range(ranks)
    ]
    keys = Layout("keys", shared, 1, tuple(tuple((h, h + 1) for h in held) for held in parts))
    names = ("q", "k", "v", "decay", "beta")
    by_name = dict(zip(names, map(operand, operands(5, shared, units)), strict=True))
    for name, value in by_name.items():
        by_name[name] = value.sharded(1, keys if name in "qk" else values)
    run(GATED_DELTA_RULE, *by_name.values(), STARTS, 0, ranks=ranks).assert_sound(exact=True)


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize(("values", "keys"), [(6, 3), (6, 6), (6, 2), (8, 1)])
def test_the_plan_of_any_tp_is_sound(values: int, keys: int, tp: int) -> None:
    heads = plan_heads(values, keys, tp, LINEAR_HEADS)
    names = ("q", "k", "v", "decay", "beta")
    by_name = dict(zip(names, map(operand, operands(5, keys, values)), strict=True))
    for name, value in by_name.items():
        by_name[name] = value.sharded(1, heads.keys if name in "qk" else heads.queries)
    run(GATED_DELTA_RULE, *by_name.values(), STARTS, 0, ranks=tp).assert_sound(exact=True)


def test_all_key_heads_on_every_rank() -> None:
    run(GATED_DELTA_RULE, **sharded(keys=None), starts=STARTS, layer=0, ranks=2).assert_sound(
        exact=True
    )


def test_refuses_the_key_heads_of_another_rank() -> None:
    turned = Layout("linear_k_heads", 3, 1, (((1, 3),), ((0, 2),)))
    message = refused_rule("linear-k-heads", **{n: sharded(keys=turned)[n] for n in "qk"})
    assert "also key head 0, which value head 0 reads" in message
    alone = sharded(values=None)
    refused_rule("linear-k-heads", **{n: alone[n] for n in ("v", "decay", "beta")})


@pytest.mark.parametrize("gate", ["decay", "beta"])
def test_refuses_the_gates_of_other_heads(gate: str) -> None:
    turned = Layout("linear_v_heads", 6, 1, tuple(reversed(HEADS.queries.parts)))
    for wrong in (sharded(values=turned)[gate], sharded(values=None)[gate]):
        message = refused_rule("delta-rule", **{gate: wrong})
        assert "the gates of a rank's own value heads" in message
    refused_rule("delta-rule", **{gate: random(5, 3)})


def test_refuses_a_decay_in_16_bits() -> None:
    whole = operands(5, 3, 6)[3]
    narrow = operand(whole.bfloat16()).sharded(1, HEADS.queries)
    assert "a decay in fp32" in refused_rule("delta-rule", decay=narrow)
    assert "a share in" in refused_rule(
        "delta-rule", beta=operand(whole.double()).sharded(1, HEADS.queries)
    )


def test_refuses_operands_that_do_not_fit() -> None:
    values = sharded()
    message = refused_rule("delta-rule", q=operand(values["q"].whole.bfloat16()))
    assert "q and k of the same type and layout" in message
    assert "q and k of the same" in refused_rule("delta-rule", k=sharded(keys=None)["k"])
    assert "the same tokens and dtype" in refused_rule("delta-rule", v=random(4, 6, 8))
    narrow = operand(values["v"].whole.bfloat16()).sharded(1, HEADS.queries)
    assert "the same tokens and dtype" in refused_rule("delta-rule", v=narrow)
    pairs = {n: random(5, 4, 16) for n in "qk"}
    assert "share the key heads evenly" in refused_rule("delta-rule", **pairs)
    assert "no map" in refused_rule("delta-rule", k_heads=[0, 0, 1, 1, 2, 2])
    refused_rule("delta-rule", starts=operand(torch.tensor([0, 5]).int()))
    refused_rule("delta-rule", starts=operand(torch.tensor([0, 2, 5])).sharded(0, HEADS.keys))


def test_refuses_parts_of_heads_and_sums_not_taken() -> None:
    width = Layout("width", 8, 1, even_runs(8, 2))
    plain = sharded(None, None)
    refused("whole-heads", GATED_DELTA_RULE, **{**plain, "v": random(5, 6, 8).sharded(2, width)},
            starts=STARTS, layer=0)  # fmt: skip
    refused_rule("delta-rule", v=random(5, 6, 8).partial())
    partial = {n: plain[n].partial() for n in "qk"}
    refused("partial-nonlinear", GATED_DELTA_RULE, **{**plain, **partial}, starts=STARTS, layer=0)


CHANNELS = FusedLayout((HEADS.keys.with_grain(4), HEADS.keys.with_grain(4), HEADS.queries))
X, WEIGHT, BIAS = random(5, 30), random(30, 1, 3, seed=1), random(30, seed=2)
CUT = X.sharded(1, CHANNELS), WEIGHT.sharded(0, CHANNELS), BIAS.sharded(0, CHANNELS)


def test_channels_on_ranks() -> None:
    run(CAUSAL_CONV, *CUT, STARTS, 0, ranks=2).assert_sound()
    run(CAUSAL_CONV, X, WEIGHT, None, STARTS, 0, ranks=2).assert_sound(exact=True)


def test_refuses_taps_of_other_channels() -> None:
    """Ranks must not cut the fused channels in runs, as if they were one axis."""
    x, weight, bias = CUT
    runs = Layout("channels", 30, 1, even_runs(30, 2))
    for wrong in (
        runs,
        FusedLayout((HEADS.queries, HEADS.keys.with_grain(4), HEADS.keys.with_grain(4))),
    ):
        error = refused("causal-conv", CAUSAL_CONV, x, WEIGHT.sharded(0, wrong), None, STARTS, 0)
        assert "a rank's own channels" in str(error)
        refused("causal-conv", CAUSAL_CONV, x, weight, BIAS.sharded(0, wrong), STARTS, 0)
    refused("causal-conv", CAUSAL_CONV, x, WEIGHT, None, STARTS, 0)
    refused("causal-conv", CAUSAL_CONV, X, weight, None, STARTS, 0)
    refused("causal-conv", CAUSAL_CONV, X, WEIGHT.partial(), None, STARTS, 0)
    refused("causal-conv", CAUSAL_CONV, X, WEIGHT, bias.partial(), STARTS, 0)


def test_refuses_other_convolutions() -> None:
    tokens = Layout("tokens", 5, 1, even_runs(5, 2))
    refused("causal-conv", CAUSAL_CONV, X.sharded(0, tokens), WEIGHT, None, STARTS, 0)
    refused("partial-nonlinear", CAUSAL_CONV, X.partial(), WEIGHT, None, STARTS, 0)
    for weight in (random(30, 3), random(30, 2, 3), random(29, 1, 3)):
        refused("causal-conv", CAUSAL_CONV, X, weight, None, STARTS, 0)
    refused("causal-conv", CAUSAL_CONV, X, operand(WEIGHT.whole.bfloat16()), None, STARTS, 0)
    refused("causal-conv", CAUSAL_CONV, X, WEIGHT, random(29), STARTS, 0)
    refused("causal-conv", CAUSAL_CONV, X, WEIGHT, None, operand(torch.tensor([0, 5]).int()), 0)


def test_the_decay_of_a_rank_s_own_heads() -> None:
    a, rate, bias = random(5, 6), random(6, seed=1), random(6, seed=2)
    shards = [
        a.sharded(1, HEADS.queries),
        *(vector.sharded(0, HEADS.queries) for vector in (rate, bias)),
    ]
    run(DELTA_DECAY, *shards, ranks=2).assert_sound()
    turned = Layout("linear_v_heads", 6, 1, tuple(reversed(HEADS.queries.parts)))
    for wrong in (rate, rate.sharded(0, turned)):
        refused("same-layout", DELTA_DECAY, shards[0], wrong, shards[2])
        refused("same-layout", DELTA_DECAY, shards[0], shards[1], wrong)
    refused("delta-decay", DELTA_DECAY, shards[0], random(3), bias)
    for place in range(3):
        sums = [value.partial() if i == place else value for i, value in enumerate((a, rate, bias))]
        refused("partial-nonlinear", DELTA_DECAY, *sums)


def test_the_cost_counts_the_state_once_in_and_out() -> None:
    kinds = [value.kind for value in sharded().values()]
    result = SPECS[GATED_DELTA_RULE].rule(*kinds, STARTS.kind, 0)
    assert isinstance(result, ValueType)
    streamed = SPECS[CAUSAL_CONV].cost(result, kinds, 0)
    cost = SPECS[GATED_DELTA_RULE].cost(result, kinds, 0)
    state = 5 * 3 * 8 * 16  # the value heads of a rank, for each of 5 tokens
    assert cost.memory_bytes - streamed.memory_bytes == 8 * state
    assert cost.flops == 7 * state
