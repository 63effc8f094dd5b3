"""Routers are recognised, with normalised scores and without; near misses are refused."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from tests.passes.graphs import GraphBuilder
from tpcompile.errors import PassError
from tpcompile.ir.checker import check_graph
from tpcompile.ir.ops import EXPERTS, LINEAR, TOP_EXPERTS, arguments_of
from tpcompile.passes.raise_experts import RaiseExperts
from tpcompile.rewriting.rewrite import calls

aten = torch.ops.aten
MODEL = "tiny-qwen3-moe"
HIDDEN, COUNT, FEATURES = 8, 5, 3


def router(
    *,
    dtype: torch.dtype = torch.bfloat16,
    shares: torch.dtype = torch.float32,
    normalized: bool = True,
    rounded: bool = True,
    divisor: str = "scores",
    logits_chosen: bool = False,
    ids_of: int = 1,
) -> fx.GraphModule:
    builder = GraphBuilder()
    x = builder.input("x", "T", HIDDEN, dtype=dtype)
    logits = builder.call(LINEAR, x, builder.parameter("router", COUNT, HIDDEN, dtype=dtype))
    spread = builder.call(aten.softmax.int, logits, -1, shares)
    choice = builder.call(aten.topk.default, logits if logits_chosen else spread, 2)
    scores, ids = builder.part(choice, 0), builder.part(choice, ids_of)
    if normalized:
        whole = scores if divisor == "scores" else spread
        total = builder.call(aten.sum.dim_IntList, whole, [-1], True)
        scores = builder.call(aten.div_.Tensor, scores, total)
    if rounded:
        scores = builder.call(aten.to.dtype, scores, dtype)
    weights = (("gate_up", COUNT, 2 * FEATURES, HIDDEN), ("down", COUNT, HIDDEN, FEATURES))
    experts = [builder.parameter(*shape, dtype=dtype) for shape in weights]
    kind = x.meta["type"]
    return builder.done(builder.call(EXPERTS, x, scores, ids, *experts, kind=kind))


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_router(normalized: bool, dtype: torch.dtype) -> None:
    gm = router(normalized=normalized, dtype=dtype, rounded=dtype != torch.float32)
    assert RaiseExperts().apply(gm).matches == 1
    assert check_graph(gm) == []
    (choice,) = calls(gm, TOP_EXPERTS)
    arguments = arguments_of(choice)
    assert (arguments["count"], arguments["normalized"]) == (2, normalized)
    assert not calls(gm, aten.topk.default)
    (mixture,) = calls(gm, EXPERTS)
    items = [arguments_of(mixture)[name] for name in ("scores", "ids")]
    assert [(item.target, item.args) for item in items] == [
        (operator.getitem, (choice, place)) for place in (0, 1)
    ]


NEAR: dict[str, tuple[dict[str, object], str]] = {
    "scores in 16 bits": ({"shares": torch.bfloat16, "rounded": False}, "expected torch.float32"),
    "scores that are not rounded": ({"rounded": False}, "its scores must be rounded"),
    "scores by the sum of all": ({"divisor": "all"}, "it must divide the scores by their sum"),
    "the largest logits": ({"logits_chosen": True}, "expected aten.softmax"),
}


@pytest.mark.parametrize("name", NEAR)
def test_other_routers_are_refused(name: str) -> None:
    changes, message = NEAR[name]
    gm = router(**changes)  # type: ignore[arg-type]
    with pytest.raises(PassError, match="There is no router in the graph") as refused:
        RaiseExperts().apply(gm)
    assert message in str(refused.value)
