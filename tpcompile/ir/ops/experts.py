"""Mixtures of experts: the choice of a token's experts, and the sum of their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from tpcompile.ir.layout import FusedLayout, Layout
from tpcompile.ir.ops.elementwise import swiglu
from tpcompile.ir.ops.linear import LINEAR
from tpcompile.ir.ops.pointwise import silu
from tpcompile.ir.ops.spec import (
    Cost,
    declare,
    define,
    dim_of,
    local_bytes,
    numel,
    require,
    streaming_cost,
)
from tpcompile.ir.types import PARTIAL, REPLICATE, Placement, ValueType
from tpcompile.ir.values.build import (
    along_last,
    called,
    cast,
    elementwise,
    pointwise,
    reduced,
    without_batch,
)
from tpcompile.ir.values.scope import Scope
from tpcompile.ir.values.value import OpaqueError, Value

aten = torch.ops.aten


def top_experts(
    logits: torch.Tensor, count: int, normalized: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the `count` experts with the largest logits; return their scores and their numbers.

    Scores are the softmax over all experts, in fp32. If they are `normalized`, those of a token add
    up to 1. They are rounded last. Among equal logits, the lower number wins; torch's `topk`, which
    Hugging Face calls, guarantees no order.
    """
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    ids = order[..., :count].contiguous()
    return scores_of(logits, ids, normalized), ids


def scores_of(logits: torch.Tensor, ids: torch.Tensor, normalized: bool) -> torch.Tensor:
    """Return the scores of chosen experts: see `top_experts`."""
    scores = functional.softmax(logits, -1, dtype=torch.float32).gather(-1, ids)
    if normalized:
        scores = scores / scores.sum(-1, keepdim=True)
    return scores.to(logits.dtype)


class Routed(NamedTuple):
    """The choices of a router for some tokens."""

    logits: torch.Tensor
    """The scores of all experts, `[tokens, experts]`."""
    scores: torch.Tensor
    """The scores of the chosen experts, `[tokens, chosen]`."""
    ids: torch.Tensor
    """The numbers of the chosen experts, `[tokens, chosen]`."""


def replayed(routed: Routed, ids: torch.Tensor, normalized: bool) -> torch.Tensor:
    """Return the scores of the experts `ids` of each token, in their order.

    A token whose own choice is the same keeps its scores; otherwise its logits determine them.
    """
    places = (ids.unsqueeze(-1) == routed.ids.unsqueeze(-2)).int().argmax(-1)
    scores, recomputed = routed.scores.gather(-1, places), scores_of(routed.logits, ids, normalized)
    return torch.where(same_experts(routed.ids, ids).unsqueeze(-1), scores, recomputed)


def same_experts(ids: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return whether two choices are the same, in any order, for each token."""
    return (ids.sort(-1).values == other.sort(-1).values).all(-1)


def experts(
    x: torch.Tensor,
    scores: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    first: int = 0,
    linear: Callable[..., torch.Tensor] = LINEAR,
) -> torch.Tensor:
    """Add the results of each token's experts, multiplied by their scores.

    Expert `e` is a SwiGLU MLP: `gate_up[e]` has the rows of gate and then of up, `down[e]` those of
    the result. The tensors begin with expert `first`; others are on other ranks. Results are added
    in fp32, in the order of the experts' numbers, so a sum depends on the token alone. Only the
    weights of chosen experts are read.
    """
    total = torch.zeros_like(x, dtype=torch.float32)
    for expert, tokens, places in chosen(ids, first, len(down)):
        gate, up = linear(x[tokens], gate_up[expert]).chunk(2, -1)
        weights = scores[tokens, places].float().unsqueeze(-1)
        total[tokens] += linear(swiglu(gate, up, silu), down[expert]).float() * weights
    return total.to(x.dtype)


def chosen(
    ids: torch.Tensor, first: int, count: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield the chosen experts among `count` from `first` on, in order.

    Each comes with its tokens, and its places among their choices.
    """
    numbers, counts = torch.unique(ids, return_counts=True)
    order = torch.argsort(ids.flatten(), stable=True)
    for number, picks in zip(numbers.tolist(), torch.split(order, counts.tolist()), strict=True):
        if 0 <= number - first < count:
            yield number - first, picks // ids.shape[1], picks % ids.shape[1]


def _top_experts_rule(
    logits: ValueType, count: int, normalized: bool
) -> tuple[ValueType, ValueType]:
    whole = logits.placement == REPLICATE
    require(whole, "router", logits, "the same logits of all experts on every rank")
    extent = logits.shape[-1]
    possible = isinstance(extent, int) and 0 < count <= extent
    require(possible, "router", f"{count} of {logits}", "a choice of some of the experts")
    shape = (*logits.shape[:-1], count)
    return ValueType(shape, logits.dtype), ValueType(shape, torch.int64)


def _experts_rule(
    x: ValueType,
    scores: ValueType,
    ids: ValueType,
    gate_up: ValueType,
    down: ValueType,
    first: int = 0,
) -> ValueType:
    require(first == 0, "experts", first, "no offset, since it follows from the layout of a rank")
    whole = all(kind.placement == REPLICATE for kind in (x, scores, ids))
    require(
        whole and x.dims == ids.dims == 2,
        "experts",
        f"{x}, {scores}, {ids}",
        "tokens and their choices on every rank",
    )
    require(
        scores.shape == ids.shape and ids.shape[:-1] == x.shape[:-1] and ids.dtype == torch.int64,
        "experts",
        f"{scores}, {ids}",
        "a score for each choice of a token",
    )
    require(
        gate_up.dims == down.dims == 3
        and gate_up.shape[0] == down.shape[0]
        and down.shape[1] == gate_up.shape[2] == x.shape[-1]
        and 2 * down.shape[2] == gate_up.shape[1],
        "experts",
        f"{x}, {gate_up}, {down}",
        "gate_up[experts, 2 * features, hidden] and down[experts, hidden, features]",
    )
    dtypes = {kind.dtype for kind in (x, scores, gate_up, down)}
    require(len(dtypes) == 1, "experts", f"{x}, {gate_up}, {down}", "operands of the same dtype")
    return ValueType(x.shape, x.dtype, _placement(gate_up, down))


def _placement(gate_up: ValueType, down: ValueType) -> Placement:
    """Return the placement of the sum: of all experts, of some, or of some features of each."""
    whole, features = down.layout_of(0), down.layout_of(2)
    if gate_up.placement == down.placement == REPLICATE:
        return REPLICATE
    if isinstance(features, Layout):
        layout: object = features
        split = gate_up.layout_of(1) == FusedLayout((features, features))
        wanted = "the same features of gate, of up and of the columns of down on a rank"
    else:
        layout, split = whole, whole is not None and gate_up.layout_of(0) == whole
        wanted = "one run of whole experts per rank, or some features of each"
        split = split and isinstance(whole, Layout) and all(len(part) == 1 for part in whole.parts)
    require(split, "experts", f"{gate_up}, {down}", wanted)
    assert isinstance(layout, Layout)
    overlap = layout.overlap()
    require(overlap is None, "experts", overlap, "disjoint parts, since a sum has each once")
    return PARTIAL


def _localize(result: ValueType, rank: int, gate_up: ValueType, **_: Any) -> dict[str, Any]:
    layout = gate_up.layout_of(0)
    return {"first": layout.intervals(rank)[0][0]} if isinstance(layout, Layout) else {}


def _experts_cost(result: ValueType, operands: Sequence[ValueType], rank: int) -> Cost:
    """Return the cost of the experts that a token is expected to choose on a rank."""
    x, _, ids, *weights = operands
    count, whole = ids.extent(-1), weights[0].extent(0)
    elements = sum(numel(kind.local_shape(rank)) for kind in weights)
    read = sum(local_bytes(kind, rank) for kind in weights)
    moved = sum(local_bytes(kind, rank) for kind in (result, x))
    return Cost(flops=2 * elements * count // whole, memory_bytes=moved + read * count // whole)


def _softmax_rule(self: ValueType, dim: int, dtype: torch.dtype | None = None) -> ValueType:
    _require_last(self, dim)
    return ValueType(self.shape, dtype or self.dtype)


def _topk_rule(
    self: ValueType, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[ValueType, ValueType]:
    _require_last(self, dim)
    shape = (*self.shape[:-1], k)
    return ValueType(shape, self.dtype), ValueType(shape, torch.int64)


def _sum_rule(
    self: ValueType,
    dim: tuple[int, ...] | None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> ValueType:
    valid, got = dim is not None and len(dim) == 1 and keepdim, f"dim={dim}, keepdim={keepdim}"
    require(valid, "router", got, "a sum over one dimension with keepdim=True")
    _require_last(self, dim[0] if dim else 0)
    return ValueType((*self.shape[:-1], 1), dtype or self.dtype)


def _divide_rule(self: ValueType, other: ValueType) -> ValueType:
    fits = other.shape in (self.shape, (*self.shape[:-1], 1)) and other.dtype == self.dtype
    whole = self.placement == other.placement == REPLICATE
    require(fits and whole, "router", f"{self} by {other}", "a divisor per value or per token")
    return self


def _require_last(kind: ValueType, dim: int) -> None:
    last = dim_of(kind, dim) == kind.dims - 1 and kind.placement == REPLICATE
    require(last, "router", f"dimension {dim} of {kind}", "the last dimension of a whole value")


def _top_experts_value(
    scope: Scope, logits: Value, count: int, normalized: bool
) -> tuple[Value, Value]:
    """Return the expressions of the choice, as models spell it with torch's `topk`."""
    shares = _softmax_value(scope, logits, -1, torch.float32)
    scores, ids = _topk_value(scope, shares, count)
    if normalized:
        total = reduced(scope.terms, "sum", scores, scores.dtype)
        scores = pointwise(scope.terms, "div", [scores, total], scores.dtype)
    return cast(scope.terms, scores, logits.dtype), ids


def _softmax_value(scope: Scope, self: Value, dim: int, dtype: torch.dtype | None = None) -> Value:
    _last(self, dim)
    return along_last(scope.terms, "softmax", self, self.shape[-1], dtype or self.dtype)


def _topk_value(
    scope: Scope, self: Value, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Value, Value]:
    _last(self, dim)
    heads = (("topk", k, largest, sorted, item) for item in ("values", "indices"))
    values, ids = (
        along_last(scope.terms, head, self, k, dtype)
        for head, dtype in zip(heads, (self.dtype, torch.int64), strict=True)
    )
    return values, ids


def _sum_value(
    scope: Scope, self: Value, dim: Any, keepdim: bool, dtype: torch.dtype | None = None
) -> Value:
    _last(self, *dim)
    if not keepdim:
        raise OpaqueError("a sum that drops its axis")
    return reduced(scope.terms, "sum", self, dtype or self.dtype)


def _last(value: Value, dim: int) -> None:
    if dim % value.dims != value.dims - 1:
        raise OpaqueError("another axis than the last one")


def _experts_value(
    scope: Scope,
    x: Value,
    scores: Value,
    ids: Value,
    gate_up: Value,
    down: Value,
    first: int = 0,
) -> Value:
    if first:
        raise OpaqueError("the offset of a rank follows from the layout")
    rows = {"x": x, "scores": scores, "ids": ids}
    bound = {name: without_batch(value, 2) for name, value in rows.items()}
    bound |= {"gate_up": gate_up, "down": down}
    (result,) = called(scope.terms, "tpc.experts", bound, (x.shape, x.dtype))
    return result


def _like_x(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty_like(x)


for _target, _rule, _value in (  # of routers, before `raise-experts`
    (aten.softmax.int, _softmax_rule, _softmax_value),
    (aten.topk.default, _topk_rule, _topk_value),
    (aten.sum.dim_IntList, _sum_rule, _sum_value),
    (aten.div_.Tensor, _divide_rule, elementwise("div")),
):
    declare(_target, _rule, streaming_cost, value=_value)

TOP_EXPERTS = define(
    top_experts, rule=_top_experts_rule, cost=streaming_cost, value=_top_experts_value
)
EXPERTS = define(
    experts,
    rule=_experts_rule,
    cost=_experts_cost,
    fake=_like_x,
    localize=_localize,
    in_formats=("gate_up", "down"),
    value=_experts_value,
)
