"""Pass `split-heads`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import fx

from tpcompile.ir.meta import operand, value_type
from tpcompile.ir.ops import LINEAR, arguments_of
from tpcompile.ir.recipe import head_parts
from tpcompile.ir.roles import HeadParts, Run
from tpcompile.rewriting.fused_linears import insert_part, split_linear
from tpcompile.rewriting.linears import join_linears
from tpcompile.rewriting.pattern import MissError, check
from tpcompile.rewriting.rewrite import (
    Report,
    calls,
    drop_dead,
    drop_unused_parameters,
    insert,
    replace,
)
from tpcompile.rewriting.structure import weight_of

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten.reshape.default, aten.flatten.using_ints)


@dataclass(frozen=True)
class SplitHeads:
    """Compute parts of heads, such as queries and their gates, by linears of their own.

    %f = linear(%n, %w)
    %q = slice(%f, 1, 0, 32)              →    %q = linear(%n, %wq)    rows 0:32 of %w
    %k = slice(%f, 1, 32, 48)                  %k = linear(%n, %wk)    rows 32:48 of %w

    %f = linear(%n, %w)                        %q = linear(%n, %wq)    rows 0:16, 32:48, … of %w
    %h = unflatten(%f, 1, [-1, 32])       →    %g = linear(%n, %wg)    rows 16:32, 48:64, … of %w
    %q, %g = split_with_sizes(%h, [16, 16])    %q = unflatten(%q, 1, [-1, 16])
                                               %g = unflatten(%g, 1, [-1, 16])

    One linear computes parts that are concatenated:

    %x = cat([%q, %k, %v], 1)             →    %x = linear(%n, %wx)    wx = wq ++ wk ++ wv
    """

    name: ClassVar[str] = "split-heads"
    after: ClassVar[tuple[str, ...]] = ("canonicalize",)
    before: ClassVar[tuple[str, ...]] = ("raise-attention", "plan-sharding")

    def apply(self, gm: fx.GraphModule) -> Report:
        report = Report()
        for linear in calls(gm, LINEAR):
            try:
                split_linear(gm, linear)
                report.matches += 1
            except MissError:
                continue  # most linears are not fused
        drop_dead(gm.graph)
        for split in calls(gm, aten.split_with_sizes.default):
            try:
                _split(gm, split)
                report.matches += 1
            except MissError as miss:
                report.miss(miss)
        drop_dead(gm.graph)  # then all readers read one part
        for parts in calls(gm, aten.cat.default):
            try:
                _join(gm, parts)
            except MissError as miss:
                report.miss(miss)
        drop_dead(gm.graph)
        drop_unused_parameters(gm)
        return report


def _split(gm: fx.GraphModule, split: fx.Node) -> None:
    bound, heads = arguments_of(split), operand(split)
    transposed = heads.target is aten.transpose.int and {*heads.args[1:]} == {0, 1}
    unflattened = operand(heads) if transposed else heads
    check(unflattened.target is aten.unflatten.int, split, "it does not split heads")
    linear, last = operand(unflattened), value_type(unflattened).dims - 1
    check(
        linear.target is LINEAR and bound["dim"] % (last + 1) == last,
        split,
        "it does not split heads",
    )
    for node in (linear, unflattened, heads):
        check(len(node.users) == 1, node, "another node reads the whole heads")
    width, items = value_type(unflattened).extent(-1), list(split.users)
    first = 0
    for place, size in enumerate(bound["split_sizes"]):
        part_items = [item for item in items if item.args[1] == place]
        with gm.graph.inserting_before(unflattened):
            run = Run(0, size, first, width)
            part = insert_part(
                gm, linear, linear, place, partial(head_parts, run=run), partial(_role, run)
            )
            whole = insert(unflattened, aten.unflatten.int, part, last - 1, [-1, size])
            if transposed:
                whole = insert(unflattened, aten.transpose.int, whole, 0, 1)
        for item in part_items:
            if not transposed:
                _view_again(item, part)
            replace(item, whole)
        first += size


def _role(run: Run, rows: int) -> HeadParts:
    return HeadParts((run._replace(rows=rows),))


def _view_again(item: fx.Node, part: fx.Node) -> None:
    """Let readers that merge or regroup the heads of a part read the part's linear instead."""
    tokens = value_type(item).shape[:-2]
    place = len(tokens)
    for user in list(item.users):
        if user.target not in _VIEWS:
            continue
        shape = value_type(user).shape
        if shape[:place] != tokens:
            continue
        if len(shape) == place + 1:
            replace(user, part)
        elif len(shape) == place + 2:
            _view_again(user, part)
            with part.graph.inserting_before(user):
                heads = insert(user, aten.unflatten.int, part, place, [-1, shape[-1]])
            replace(user, heads)


def _join(gm: fx.GraphModule, parts: fx.Node) -> None:
    """Compute parts that are concatenated, such as the inputs of a convolution, by one linear."""
    dim, last = arguments_of(parts)["dim"], value_type(parts).dims - 1
    if dim in (last, -1) and all(map(_is_part, parts.all_input_nodes)):
        join_linears(gm, parts)


def _is_part(node: fx.Node) -> bool:
    return node.target is LINEAR and isinstance(value_type(weight_of(node)).role, HeadParts)
