"""Mistakes in linear attention: other heads, channels and states."""

from __future__ import annotations

import torch
from torch import fx

from benchmarks.mutations.draft import (
    Draft,
    UnfitError,
    layer_of,
    place_of,
    relayout,
    segments_of,
    set_shard,
    with_parts,
)
from benchmarks.mutations.layouts import alike, moved_boundary, part_of, with_run
from benchmarks.mutations.slices import swap_parts
from tpcompile.ir.layout import Layout, even_runs
from tpcompile.ir.meta import operand, parameter_of, set_parameter, value_type
from tpcompile.ir.ops import (
    CAUSAL_CONV,
    DELTA_DECAY,
    GATED_DELTA_RULE,
    LINEAR,
    RESUMED_CONV,
    RESUMED_DELTA_RULE,
    STATE_OPS,
    arguments_of,
)
from tpcompile.rewriting.rewrite import insert

aten = torch.ops.aten

VALUES, KEYS = "linear_v_heads", "linear_k_heads"
_RULES = (GATED_DELTA_RULE, RESUMED_DELTA_RULE)
_CONVS = (CAUSAL_CONV, RESUMED_CONV)


def _linear(node: fx.Node) -> fx.Node:
    """Return the linear with this result, alone or as one of its parts."""
    while node.target is not LINEAR:
        node = operand(node)
    return node


def gates_of_other_heads(draft: Draft) -> str:
    """Give the ranks the gates of each other's heads, or all of them, in type and recipe."""
    rule = draft.pick(draft.calls(*_RULES), "delta rule")
    decay, beta = (operand(rule, place_of(rule, name)) for name in ("decay", "beta"))
    parameters = [operand(_linear(operand(gate)), 1) for gate in (decay, beta)]
    parameters += [operand(decay, place) for place in (1, 2)]
    node = draft.pick(parameters, "gate")
    old = part_of(node, VALUES)
    turned = with_parts(old, (*old.parts[1:], old.parts[0]))
    if turned.parts == old.parts:
        raise UnfitError("all ranks have the same heads")
    relayout(node, VALUES, turned)
    return f"the ranks have gates {turned.parts} of %{node.name}"


def gates_moved(draft: Draft) -> str:
    """Move the boundary between the gates of two ranks, in one or in all gates of a layer."""
    rule = draft.pick(draft.calls(*_RULES), "delta rule")
    gates = [
        node
        for node in draft.split_parameters(axis=VALUES)
        if layer_of(node) == layer_of(rule) and segments_of(node)[0].grain == 1
    ]
    if draft.dice.random() < 0.5:
        gates = [draft.pick(gates, "gate")]
    new = draft.pick(moved_boundary(part_of(gates[0], VALUES)), "boundary")
    for node in gates:
        if len(segments_of(node)) == 1:
            relayout(node, VALUES, new)
    return f"layer {layer_of(rule)}: gates {new.parts} of {len(gates)} parameters"


def channels_as_one(draft: Draft) -> str:
    """Cut the channels of a convolution, and its projection, in even runs of all of them."""
    conv = draft.pick(draft.calls(*_CONVS), "convolution")
    for node in (operand(_linear(operand(conv)), 1), operand(conv, 1)):
        parameter = parameter_of(node)
        rows = int(parameter.type.shape[0])
        layout = Layout("channels", rows, 1, even_runs(rows, draft.tp))
        set_parameter(node, parameter.sharded(0, layout))
    return f"the channels of %{conv.name} cut as one axis"


def channels_swapped(draft: Draft) -> str:
    """Swap the channels of two parts on all ranks, in the projection and in the taps."""
    conv = draft.pick(draft.calls(*_CONVS), "convolution")
    part, other = draft.pick(((0, 1), (0, 2), (1, 2)), "two parts")
    linear = operand(conv)
    if linear.target is not LINEAR:
        raise UnfitError("the channels share a linear with gates")
    chosen = [operand(linear, 1), operand(conv, 1)]
    if draft.dice.random() < 0.5:
        chosen = [draft.pick(chosen, "parameter")]
    for node in chosen:
        for rank in range(draft.tp):
            set_shard(node, rank, swap_parts(parameter_of(node).shards[rank], part, other))
    return f"parts {part} and {other} of {len(chosen)} parameters of %{conv.name} swapped"


def key_heads_by_habit(draft: Draft) -> str:
    """Choose the key heads of a rank by `rank // k` instead of by its value heads."""
    node = draft.pick(draft.split_parameters(axis=KEYS), "key heads")
    keys = part_of(node, KEYS)
    runs = tuple(
        ((first := rank * keys.units // keys.ranks, max(first + 1, last)),)
        for rank in range(keys.ranks)
        for last in [(rank + 1) * keys.units // keys.ranks]
    )
    return _keep_keys(draft, node, with_parts(keys, runs))


def other_key_heads(draft: Draft) -> str:
    """Give some rank a key head that it does not read instead of one that it reads."""
    node = draft.pick(draft.split_parameters(axis=KEYS), "key heads")
    keys = part_of(node, KEYS)
    rank = draft.dice.randrange(keys.ranks)
    start, stop = keys.parts[rank][0]
    moved = [(start + step, stop + step) for step in (-1, 1)]
    inside = [run for run in moved if run[0] >= 0 and run[1] <= keys.units]
    run = draft.pick(inside, "room beside its key heads")
    return _keep_keys(draft, node, with_parts(keys, with_run(keys, rank, run)))


def _keep_keys(draft: Draft, node: fx.Node, new: Layout) -> str:
    rule = next(n for n in draft.calls(*_RULES) if layer_of(n) == layer_of(node))
    values = value_type(rule).layout_of(1)
    assert isinstance(values, Layout)
    group = values.units // new.units
    if all(
        {h // group for h in values.units_of(r)} <= set(new.units_of(r)) for r in range(new.ranks)
    ):
        raise UnfitError("every rank still has the key heads that it reads")
    for member in alike(draft, KEYS, node):
        relayout(member, KEYS, new)
    return f"layer {layer_of(node)}: key heads {new.parts}"


def decay_rounded(draft: Draft) -> str:
    """Round the decay, or what it is computed from, to 16 bits."""
    rule = draft.pick(draft.calls(*_RULES), "delta rule")
    decay = operand(rule, place_of(rule, "decay"))
    with draft.graph.inserting_after(decay):
        narrow = insert(decay, aten.to.dtype, decay, torch.bfloat16)
    narrow.meta["type"] = value_type(decay)
    rule.update_arg(place_of(rule, "decay"), narrow)
    return f"%{rule.name} has a decay in bf16"


def state_of_layer(draft: Draft) -> str:
    """Make one op read and write the states of another layer."""
    node = draft.pick(draft.calls(*STATE_OPS), "op with states")
    place = place_of(node, "layer")
    layer = node.args[place]
    assert isinstance(layer, int)
    node.update_arg(place, 1 - layer)
    return f"%{node.name} uses layer {1 - layer} of the states, not {layer}"


def states_out_of_order(draft: Draft) -> str:
    """Let the layers use each other's states, in this order of layers."""
    target = draft.pick(list(STATE_OPS), "kind of states")
    nodes = draft.calls(target)
    draft.pick(nodes, "op with states")
    for node in nodes:
        layer = arguments_of(node)["layer"]
        node.update_arg(place_of(node, "layer"), len(nodes) - 1 - layer)
    return f"{len(nodes)} ops like %{nodes[0].name} use states in reverse order"


def numbers_of_states(draft: Draft) -> str:
    """Read the state that is written, or write the one that is read, or count other tokens."""
    nodes = draft.calls(*STATE_OPS)
    node = draft.pick(nodes, "op with states")
    inputs = {name: operand(node, place_of(node, name)) for name in ("lengths", "read", "write")}
    number, other = draft.pick(
        [("read", "write"), ("write", "read"), ("lengths", "read")], "number"
    )
    chosen = nodes if draft.dice.random() < 0.5 else [node]
    for reader in chosen:
        reader.update_arg(place_of(reader, number), inputs[other])
    return f"{len(chosen)} ops like %{node.name} take %{inputs[other].name} as {number}"


def states_shifted(draft: Draft) -> str:
    """Shard the states, or the tails, unlike the heads that have them."""
    inputs = {
        operand(node, place_of(node, name))
        for node in draft.calls(*STATE_OPS)
        for name in STATE_OPS[node.target]
    }
    node = draft.pick(sorted(inputs, key=lambda item: item.name), "input with states")
    kind = value_type(node)
    parts = segments_of(node)
    new = draft.pick(moved_boundary(parts[-1]), "boundary")
    if len(parts) > 1:
        raise UnfitError("channels of several axes")
    dim = next(place for place in range(kind.dims) if kind.layout_of(place) is not None)
    node.meta["type"] = kind.sharded(dim, new)
    return f"%{node.name} with the heads {new.parts}"


def decay_of_layer(draft: Draft) -> str:
    """Take the decay of another layer."""
    decays = draft.calls(DELTA_DECAY)
    node = draft.pick(decays[1:], "second decay")
    first = decays[0]
    for place in (1, 2):
        node.update_arg(place, operand(first, place))
    return f"%{node.name} has the rates of %{first.name}"
