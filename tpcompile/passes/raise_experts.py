"""Pass `raise-experts`."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from tpcompile.ir.meta import operand, value_type
from tpcompile.ir.ops import EXPERTS, TOP_EXPERTS
from tpcompile.ir.pattern import UNKNOWN
from tpcompile.rewriting.pattern import Call, MissError, Number, Value, check, match, matches
from tpcompile.rewriting.rewrite import Report, calls, drop_dead, insert, insert_item, replace

aten = torch.ops.aten

_SHARES = Call(aten.softmax.int, (Value("logits"), UNKNOWN, torch.float32))
_CHOICE = Call(aten.topk.default, (_SHARES, Number("count"), UNKNOWN))
_TOTAL = Call(aten.sum.dim_IntList, (Value("scores"), UNKNOWN, True))
_NORMALIZED = Call(aten.div_.Tensor, (Value("scores"), _TOTAL))


@dataclass(frozen=True)
class RaiseExperts:
    """Recognise the router of a mixture of experts.

    %p = softmax(%logits, -1, float32)
    %v, %ids = topk(%p, 8)                   →   %scores, %ids = tpc.top_experts(%logits, 8, True)
    %d = div_(%v, sum(%v, [-1], True))
    %scores = to(%d, bfloat16)
    """

    name: ClassVar[str] = "raise-experts"
    after: ClassVar[tuple[str, ...]] = ("canonicalize",)
    before: ClassVar[tuple[str, ...]] = ("plan-sharding",)

    def apply(self, gm: fx.GraphModule) -> Report:
        report = Report()
        for choice in calls(gm, aten.topk.default):
            try:
                _raise(choice)
                report.matches += 1
            except MissError as miss:
                report.miss(miss)
        drop_dead(gm.graph)
        return report.require(gm, "router", TOP_EXPERTS) if calls(gm, EXPERTS) else report


def _raise(choice: fx.Node) -> None:
    bindings = match(_CHOICE, choice)
    items = {int(item.args[1]): item for item in choice.users if item.target is operator.getitem}  # type: ignore[arg-type]
    check(items.keys() == {0, 1}, choice, "its values and its numbers must both be read")
    scores, normalized = _normalized(items[0])
    logits: fx.Node = bindings["logits"]
    if value_type(scores).dtype != value_type(logits).dtype:
        scores = _only_user(scores, aten.to.dtype)
    check(
        value_type(scores).dtype == value_type(logits).dtype,
        scores,
        "its scores must be rounded to the dtype of the logits",
    )
    with choice.graph.inserting_before(choice):
        new = insert(choice, TOP_EXPERTS, logits, bindings["count"], normalized)
        replace(scores, insert_item(scores, new, 0, f"{new.name}_scores"))
        replace(items[1], insert_item(items[1], new, 1, f"{new.name}_ids"))


def _normalized(values: fx.Node) -> tuple[fx.Node, bool]:
    """Return the scores before they are rounded, and whether they were divided by their sum."""
    divided = [user for user in values.users if user.target is aten.div_.Tensor]
    if not divided:
        return values, False
    (scores,) = divided
    matched = matches(_NORMALIZED, scores) and operand(scores) is values
    check(matched, scores, "it must divide the scores by their sum")
    return scores, True


def _only_user(node: fx.Node, target: object) -> fx.Node:
    (user,) = node.users if len(node.users) == 1 else (node,)
    check(user.target is target, node, "its scores must be rounded once")
    return user
