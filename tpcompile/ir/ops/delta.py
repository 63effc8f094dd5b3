"""Linear attention by the gated delta rule: its convolution, its decay and its recurrence.

A value head keeps a matrix `S[key width, value width]` per sequence. A token multiplies it by its
decay, replaces a share `beta` of what S returns for its key by its value, and reads S by its query:

    S ← exp(g) S
    S ← S + k ⊗ beta (v - k S)
    o = q S
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

from tpcompile.ir.ops.elementwise import join
from tpcompile.ir.ops.groups import check_groups, check_whole_heads, heads_read, local_map
from tpcompile.ir.ops.pointwise import silu
from tpcompile.ir.ops.reference import value_of_reference
from tpcompile.ir.ops.spec import Cost, define, numel, require, streaming_cost
from tpcompile.ir.types import REPLICATE, Partial, ValueType
from tpcompile.ir.values.recurrent import conv_value, rule_value

CHUNK = 64
"""The tokens that a prompt adds to the state at once. Cutting a prompt at multiples of it, counted
from its start, changes no bits."""
_EPSILON = 1e-6


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    starts: torch.Tensor,
    layer: int,
) -> torch.Tensor:
    """Convolve each channel of `x[T, channels]` with its `weight[channels, 1, taps]`; apply SiLU.

    The last tap is that of the token itself. A sequence is padded with zeros before its first
    token.
    """
    out = torch.empty_like(x)
    tokens, inputs = out.flatten(0, -2), x.flatten(0, -2)
    for start, stop in pairwise(starts.tolist()):
        before = inputs.new_zeros(weight.shape[-1] - 1, inputs.shape[-1])
        tokens[start:stop] = convolved(torch.cat([before, inputs[start:stop]]), weight, bias)
    return out


def convolved(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the results of the rows of `x` after the first `taps - 1`, which are only inputs.

    Products are added tap by tap, in fp32, so a token's bits depend on its own inputs alone.
    """
    taps = weight.shape[-1]
    count = len(x) - taps + 1
    total = x.new_zeros(count, x.shape[-1], dtype=torch.float32)
    for tap in range(taps):
        total += x[tap : tap + count].float() * weight[:, 0, tap].float()
    if bias is not None:
        total += bias.float()
    return silu(total).to(x.dtype)


def delta_decay(
    a: torch.Tensor,
    rate: torch.Tensor,
    bias: torch.Tensor,
    softplus: Callable[[torch.Tensor], torch.Tensor] = functional.softplus,
) -> torch.Tensor:
    """Return the logarithm of each head's decay, in fp32: `-exp(rate) softplus(a + bias)`."""
    return -rate.float().exp() * softplus(a.float() + bias.float())


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    starts: torch.Tensor,
    layer: int,
    k_heads: Sequence[int] | None = None,
) -> torch.Tensor:
    """Apply the gated delta rule to each sequence, whose state is zero before its first token.

    `q` and `k` are `[T, key heads, width]`, `v` is `[T, value heads, width]`, `decay` and `beta`
    are `[T, value heads]`. `k_heads` gives the key head of each value head; by default the value
    heads share the key heads evenly, in order.
    """
    out = torch.empty_like(v)
    tokens = out.flatten(0, -3)  # before canonicalize there is a batch dimension of 1
    q, k, v = (heads.flatten(0, -3) for heads in (q, k, v))
    decay, beta = decay.flatten(0, -2), beta.flatten(0, -2)
    for start, stop in pairwise(starts.tolist()):
        rows = slice(start, stop)
        state = new_state(k, v)
        tokens[rows] = delta_rule(
            q[rows], k[rows], v[rows], decay[rows], beta[rows], state, k_heads
        )
    return out


def new_state(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return the state `[value heads, key width, value width]` before the first token."""
    return v.new_zeros(v.shape[-2], k.shape[-1], v.shape[-1], dtype=torch.float32)


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    k_heads: Sequence[int] | None = None,
) -> torch.Tensor:
    """Apply the gated delta rule to consecutive tokens of a sequence, and update its state.

    Everything is computed in fp32. A single token is a step of the recurrence, also where it is
    the last chunk of a prompt; other chunks are computed as products of matrices.
    """
    heads = list(heads_read(len(state), k.shape[-2], k_heads))
    query = _normalized(q)[:, heads] * q.shape[-1] ** -0.5
    key, value = _normalized(k)[:, heads], v.float()
    operands = query, key, value, decay.float(), beta.float()
    results = []
    for start in range(0, len(v), CHUNK):
        query, key, value, log, share = (operand[start : start + CHUNK] for operand in operands)
        update = _step if len(value) == 1 else _chunk
        results.append(update(query, key, value, log, share, state))
    return torch.cat(results).to(v.dtype) if results else torch.empty_like(v)


def _normalized(x: torch.Tensor) -> torch.Tensor:
    """Divide each head by its length, in fp32."""
    wide = x.float()
    return wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + _EPSILON)


def _step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Apply the recurrence to one token."""
    state *= decay[0].exp()[:, None, None]
    recalled = (state * key[0].unsqueeze(-1)).sum(-2)
    delta = (value[0] - recalled) * beta[0].unsqueeze(-1)
    state += key[0].unsqueeze(-1) * delta.unsqueeze(-2)
    return (state * query[0].unsqueeze(-1)).sum(-2).unsqueeze(0)


def _chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Apply the recurrence to the tokens of a chunk at once.

    The additions of the tokens to the state solve a triangular system: each token replaces a share
    of the value that the state, with the additions of the tokens before it, returns for its key.
    """
    query, key, value = (operand.transpose(0, 1) for operand in (query, key, value))
    share = beta.t().unsqueeze(-1)
    total = decay.t().cumsum(-1)  # the logarithm of the decay since the start of the chunk
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
    since = total.exp().unsqueeze(-1)
    system = (key * share) @ key.mT * between
    wanted = share * (value - since * (key @ state))
    added = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = since * (query @ state) + (query @ key.mT * between) @ added
    until = (total[:, -1:] - total).exp().unsqueeze(-1)  # the decay from a token to the end
    state *= since[:, -1:]
    state += (key * until).mT @ added
    whole: torch.Tensor = out.transpose(0, 1)
    return whole


def conv_rule(
    x: ValueType, weight: ValueType, bias: ValueType | None, starts: ValueType, layer: int
) -> ValueType:
    channels = x.shape[-1]
    require(
        weight.dims == 3 and weight.shape[:2] == (channels, 1) and weight.dtype == x.dtype,
        "causal-conv",
        f"{x} with {weight}",
        "x[T, channels] and weight[channels, 1, taps] of the same dtype",
    )
    require(not isinstance(x.placement, Partial), "partial-nonlinear", x, "a value that is summed")
    by_channel = x.placement == REPLICATE or x.layout_of(-1) is not None
    require(by_channel, "causal-conv", x, "all tokens on each rank, of all channels or of its own")
    for kind in (weight, bias):
        if kind is not None:
            require(
                kind.shape[0] == channels
                and kind.layout_of(0) == x.layout_of(-1)
                and (kind.layout_of(0) is not None or kind.placement == REPLICATE),
                "causal-conv",
                f"{x} with {kind}",
                "the taps of a rank's own channels, in the same order",
            )
    check_starts(starts, "causal-conv")
    return x


def decay_rule(a: ValueType, rate: ValueType, bias: ValueType) -> ValueType:
    per_head = rate.shape == bias.shape == a.shape[-1:]
    require(per_head, "delta-decay", f"{a} with {rate}, {bias}", "a rate and a bias per head")
    whole = f"{a} with {rate}, {bias}"
    layouts = {a.layout_of(-1), rate.layout_of(0), bias.layout_of(0)}
    require(len(layouts) == 1, "same-layout", whole, "the rates and biases of a rank's own heads")
    return ValueType(a.shape, torch.float32, join(a.shape, [a, rate, bias]))


def delta_rule_type(
    q: ValueType,
    k: ValueType,
    v: ValueType,
    decay: ValueType,
    beta: ValueType,
    starts: ValueType,
    layer: int,
    k_heads: tuple[int, ...] | None = None,
) -> ValueType:
    rule = "delta-rule"
    require(q == k and q.dims >= 3, rule, f"q {q}, k {k}", "q and k of the same type and layout")
    require(
        v.shape[:-2] == q.shape[:-2] and v.dims == q.dims and v.dtype == q.dtype,
        rule,
        f"v {v}, k {k}",
        "the same tokens and dtype in both",
    )
    for name, gate in (("decay", decay), ("beta", beta)):
        require(gate.shape == v.shape[:-1], rule, f"{name} {gate}, v {v}", "one gate per head of v")
        layout = v.layout_of(-2)
        matches = gate.placement == REPLICATE if layout is None else gate.layout_of(-1) == layout
        require(matches, rule, f"{name} {gate}, v {v}", "the gates of a rank's own value heads")
    require(decay.dtype == torch.float32, rule, decay, "a decay in fp32")
    require(beta.dtype in (v.dtype, torch.float32), rule, beta, f"a share in {v.dtype} or fp32")
    check_starts(starts, rule)
    heads, shared = v.extent(-2), k.extent(-2)
    require(
        heads % shared == 0,
        rule,
        f"{heads} value and {shared} key heads",
        "value heads that share the key heads evenly",
    )
    require(k_heads is None, rule, k_heads, "no map, since each rank's is derived from the layouts")
    for kind in (q, v):
        check_whole_heads(kind, -2)
    names = "value", "key"
    check_groups(v.layout_of(-2), k.layout_of(-2), heads // shared, "linear-k-heads", names)
    return v


def check_starts(starts: ValueType, rule: str) -> None:
    known = starts.placement == REPLICATE and starts.dtype == torch.int64
    require(known, rule, starts, "starts of int64 on every rank")


def delta_localize(
    result: ValueType, rank: int, k: ValueType, v: ValueType, **_: Any
) -> dict[str, Any]:
    return local_map("k_heads", v.layout_of(-2), k.layout_of(-2), k.extent(-2), rank)


def delta_cost(result: ValueType, operands: Sequence[ValueType], rank: int) -> Cost:
    """Return the cost of a step of one token, which reads and writes the state once."""
    streamed = streaming_cost(result, operands, rank)
    state = numel(result.local_shape(rank)) * operands[0].extent(-1)
    return Cost(flops=7 * state, memory_bytes=streamed.memory_bytes + 8 * state)


CAUSAL_CONV = define(
    causal_conv,
    fake=lambda x, *_: torch.empty_like(x),
    rule=conv_rule,
    cost=streaming_cost,
    value=conv_value,
)
DELTA_DECAY = define(
    delta_decay, rule=decay_rule, cost=streaming_cost, value=value_of_reference(delta_decay)
)
GATED_DELTA_RULE = define(
    gated_delta_rule,
    fake=lambda q, k, v, *_, **__: torch.empty_like(v),
    rule=delta_rule_type,
    cost=delta_cost,
    localize=delta_localize,
    value=rule_value,
)
