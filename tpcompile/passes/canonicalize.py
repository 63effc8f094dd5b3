"""Pass `canonicalize`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from tpcompile.errors import PassError
from tpcompile.ir.info import model_of
from tpcompile.ir.meta import operand, origin_of, type_of, value_type
from tpcompile.ir.ops import GATED_DELTA_RULE, SPECS, arguments_of, op_name
from tpcompile.ir.types import Dim, ValueType
from tpcompile.rewriting.rewrite import Report, calls, drop_dead, insert, insert_bound, replace

aten = torch.ops.aten

_SHIFTED = ("dim", "dim0", "dim1")
_SIZES = ("size", "shape")
_VIEWS = (aten.view.default, aten.reshape.default)
_REPEAT = aten.repeat_interleave.self_int
_IDENTITIES = (aten.contiguous.default, aten.alias.default, aten.dropout.default)


@dataclass(frozen=True)
class Canonicalize:
    """Drop the batch dimension and no-ops; write views as unflatten and flatten.

    %u = unsqueeze(%input_ids, dim=0)        %e = embedding(%w, %input_ids)
    %e = embedding(%w, %u)             →     %h = unflatten(%q, dim=1, sizes=[-1, 64])
    %h = view(%q, [1, %T, -1, 64])

    %r = repeat_interleave(%q, 2, dim=1)
    %s = repeat_interleave(%k, 2, dim=1)     %o = gated_delta_rule(%q, %k, %v, …)
    %o = gated_delta_rule(%r, %s, %v, …) →
    """

    name: ClassVar[str] = "canonicalize"

    def apply(self, gm: fx.GraphModule) -> Report:
        before = len(gm.graph.nodes)
        _take_one_of_equals(gm.graph)
        _drop_batch(gm.graph)
        for node in list(gm.graph.nodes):
            new = _simpler(node)
            if new is not None:
                replace(node, new)
                gm.graph.erase_node(node)
        drop_dead(gm.graph)
        _refuse_repeats(gm)
        return Report(matches=before - len(gm.graph.nodes))


def _take_one_of_equals(graph: fx.Graph) -> None:
    """Replace a row of a value that was expanded to several rows by the value itself."""
    for node in list(graph.nodes):
        if node.target is not aten.select.int or node.args[1] != 0:
            continue
        rows = operand(node)
        while rows.target is aten.slice.Tensor and rows.args[1] == 0:
            rows = operand(rows)
        if rows.target is not aten.expand.default:
            continue
        row = operand(rows)
        alone = row.target is aten.unsqueeze.default and row.args[1] == 0
        if alone and value_type(operand(row)).shape == value_type(node).shape:
            replace(node, operand(row))
    drop_dead(graph)


def _drop_batch(graph: fx.Graph) -> None:
    """Remove the leading dimension of 1, which models require, from all values."""
    batched: set[fx.Node] = set()
    merged: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        source = node.args[0] if node.args else None
        if node.target is aten.unsqueeze.default and _adds_batch(node):
            assert isinstance(source, fx.Node)
            node.replace_all_uses_with(source, propagate_meta=False)
            batched.add(source)
            continue
        if batched.isdisjoint(node.all_input_nodes):
            if merged.isdisjoint(node.all_input_nodes):
                continue
            if node.target not in _VIEWS:
                merged.add(node)
                continue
        if node.target is aten.select.int and node.args[1:] == (0, 0):
            assert isinstance(source, fx.Node)
            node.replace_all_uses_with(source)
            continue
        if node.target is aten.sym_size.int:
            continue
        if node.target in _VIEWS and value_type(node).dims == 2:
            merged.add(node)  # tokens and heads are one dimension, and the batch a factor of 1
            continue
        _without_batch(node)
        batched.add(node)


def _adds_batch(node: fx.Node) -> bool:
    source, dim = node.args
    return isinstance(source, fx.Node) and source.op == "placeholder" and bool(dim == 0)


def _without_batch(node: fx.Node) -> None:
    """Rewrite the node's arguments and type for operands that have lost dimension 0."""
    spec = SPECS[node.target]
    args: list[Any] = []
    old_args: tuple[Any, ...] = node.args
    for name, arg in zip(spec.argument_names, old_args, strict=False):
        if name in _SHIFTED:
            args.append(
                [_shift(node, d) for d in arg]
                if isinstance(arg, list | tuple)
                else _shift(node, arg)
            )
        elif name in _SIZES or (name == "indices" and isinstance(arg, list | tuple)):
            args.append(list(arg[1:]))
        else:
            args.append(arg)
    node.args = tuple(args)
    kind = type_of(node)
    if isinstance(kind, tuple):
        node.meta["type"] = tuple(ValueType(k.shape[1:], k.dtype) for k in kind)
    elif isinstance(kind, ValueType):
        node.meta["type"] = ValueType(kind.shape[1:], kind.dtype)


def _shift(node: fx.Node, dim: int) -> int:
    if dim == 0:
        raise PassError(
            f"%{node.name} {op_name(node)} operates on the batch dimension",
            expected="ops that do not use the batch dimension, which has size 1",
        )
    return dim - 1 if dim > 0 else dim


def _simpler(node: fx.Node) -> fx.Node | None:
    """Return a simpler equivalent of the node, or None."""
    target = node.target
    source = node.args[0] if node.args else None
    if target is aten.cat.default:
        return _only_part(node)
    if not isinstance(source, fx.Node):
        return None
    if target in _IDENTITIES:
        return source
    if target is aten.to.dtype:
        return source if value_type(source).dtype == node.args[1] else None
    if target in _VIEWS:
        same = value_type(source).shape == value_type(node).shape
        return source if same else _as_split_or_merge(node, source)
    if target is aten.unsqueeze.default and source.target is aten.squeeze.dim:
        return operand(source) if value_type(operand(source)) == value_type(node) else None
    replacement = _REPLACEMENTS.get(target)
    return replacement(node, source) if replacement is not None else None


def _only_part(node: fx.Node) -> fx.Node | None:
    """Return the part of a concatenation whose other parts are empty, as where a head is whole."""
    dim: Any = arguments_of(node)["dim"]
    parts = [part for part in node.all_input_nodes if value_type(part).shape[dim] != 0]
    alone = len(parts) == 1 and value_type(parts[0]) == value_type(node)
    return parts[0] if alone else None


def _as_cast(node: fx.Node, source: fx.Node) -> fx.Node:
    dtype = value_type(node).dtype
    if value_type(source).dtype == dtype:
        return source
    with node.graph.inserting_before(node):
        return insert(node, aten.to.dtype, source, dtype)


def _as_split(node: fx.Node, source: fx.Node) -> fx.Node:
    dim: Any = arguments_of(node)["dim"]
    sizes = [part.shape[dim] for part in node.meta["type"]]
    with node.graph.inserting_before(node):
        return insert(node, aten.split_with_sizes.default, source, sizes, dim)


def cancel_transposes(graph: fx.Graph) -> None:
    """Bypass pairs of transposes that cancel."""
    for node in list(graph.nodes):
        inner = None
        if node.target is aten.transpose.int:
            inner = _before_cancelled_pair(node, operand(node))
        if inner is not None:
            replace(node, inner)
    drop_dead(graph)


def _before_cancelled_pair(node: fx.Node, source: fx.Node) -> fx.Node | None:
    """Return the input of the first of two transposes if they cancel, or None."""
    pair = source.target is aten.transpose.int and _swapped(node) == _swapped(source)
    return operand(source) if pair else None


def _swapped(transpose: fx.Node) -> set[int]:
    """Return the two dimensions of a transpose."""
    dims: Any = transpose.args[1:]
    return {dim % value_type(transpose).dims for dim in dims}


def _as_split_or_merge(node: fx.Node, source: fx.Node) -> fx.Node | None:
    old, new = value_type(source).shape, value_type(node).shape
    with node.graph.inserting_before(node):
        split = _split_dim(old, new)
        if split is not None:
            new_node = insert(node, aten.unflatten.int, source, split, [-1, new[split + 1]])
        else:
            merged = _split_dim(new, old)
            if merged is None:
                return None
            new_node = insert(node, aten.flatten.using_ints, source, merged, merged + 1)
    return new_node


def _split_dim(short: tuple[Dim, ...], long: tuple[Dim, ...]) -> int | None:
    """Return the dimension of `short` that is split in two in `long`, if nothing else differs."""
    if len(long) != len(short) + 1:
        return None
    for dim, extent in enumerate(short):
        outer, inner = long[dim], long[dim + 1]
        known = isinstance(outer, int) and isinstance(inner, int) and outer * inner == extent
        if known and (*long[:dim], extent, *long[dim + 2 :]) == short:
            return dim
    return None


def _as_index_select(node: fx.Node, source: fx.Node) -> fx.Node | None:
    indices: Any = node.args[1]
    places = [dim for dim, index in enumerate(indices) if index is not None]
    if len(places) != 1:
        return None
    with node.graph.inserting_before(node):
        return insert(node, aten.index_select.default, source, places[0], indices[places[0]])


def _without_repeats(node: fx.Node, query: fx.Node) -> fx.Node | None:
    """Return the delta rule of the heads that older versions of Hugging Face repeat for it.

    Value heads share the key heads evenly, in order, so the rule reads the same heads.
    """
    bound = arguments_of(node)
    key = bound["k"]
    if not all(heads.target is _REPEAT and not heads.kwargs for heads in (query, key)):
        return None
    before = {"q": operand(query), "k": operand(key)}
    if value_type(before["q"]) != value_type(before["k"]):
        return None
    with node.graph.inserting_before(node):
        return insert_bound(node, GATED_DELTA_RULE, bound | before)


def _refuse_repeats(gm: fx.GraphModule) -> None:
    """Refuse repetitions of heads that another op than the delta rule reads."""
    for node in calls(gm, _REPEAT):
        if arguments_of(node)["dim"] in (-1, value_type(node).dims - 1):
            continue  # elements of a rotary table
        raise PassError(
            f"%{node.name} {op_name(node)} repeats heads of {model_of(gm.graph)}",
            where=str(origin_of(node)),
            got=f"readers {', '.join(f'%{user.name}' for user in node.users)}",
            expected="repeated queries and keys that only gated delta rules read",
        )


_REPLACEMENTS: dict[Any, Callable[[fx.Node, fx.Node], fx.Node | None]] = {
    aten.transpose.int: _before_cancelled_pair,
    aten.type_as.default: _as_cast,
    aten.chunk.default: _as_split,
    aten.index.Tensor: _as_index_select,
    GATED_DELTA_RULE: _without_repeats,
}
"""Functions that return a simpler equivalent of a node of these ops, given its first operand."""
