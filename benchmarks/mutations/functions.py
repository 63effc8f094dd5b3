"""Mistakes unrelated to sharding: another function, sharded correctly."""

from __future__ import annotations

import torch
from torch import fx

from benchmarks.mutations.draft import Draft, UnfitError, layer_of, place_of, renamed, segments_of
from benchmarks.mutations.slices import swap_parts
from tpcompile.ir.meta import Parameter, operand, parameter_of, parameters, set_parameter, type_of
from tpcompile.ir.ops import ADD_RMS_NORM, RMS_NORM, ROPE, SWIGLU

aten = torch.ops.aten


def fused_parts_swapped(draft: Draft) -> str:
    """Concatenate a fused tensor in another order, on every rank and in the whole."""
    fused = [n for n in draft.split_parameters(dim=0) if len(segments_of(n)) > 1]
    node = draft.pick(fused, "fused parameter")
    last = len(segments_of(node)) - 1
    parameter = parameter_of(node)
    shards = tuple(swap_parts(recipe, last - 1, last) for recipe in parameter.shards)
    whole = swap_parts(parameter.whole, last - 1, last)
    set_parameter(node, Parameter(parameter.type, whole, shards))
    return f"the last two parts of %{node.name} swapped"


def gate_for_up(draft: Draft) -> str:
    node = draft.pick(draft.calls(SWIGLU), "swiglu")
    node.args = node.args[::-1]
    return f"%{node.name} of up and gate"


def keys_for_values(draft: Draft) -> str:
    node = draft.pick(draft.attentions(), "attention")
    source, target = draft.pick([(1, 2), (2, 1)], "operand")
    node.update_arg(target, node.args[source])
    return f"%{node.name} reads operand {source} as {target} too"


def wrong_tensor(draft: Draft) -> str:
    """Build a parameter from the tensor of another layer."""
    node = draft.pick([n for n in parameters(draft.graph) if layer_of(n) is not None], "parameter")
    layer = layer_of(node) or 0
    parameter = parameter_of(node)
    whole, *shards = (
        renamed(recipe, f".{layer}.", f".{1 - layer}.")
        for recipe in (parameter.whole, *parameter.shards)
    )
    set_parameter(node, Parameter(parameter.type, whole, tuple(shards)))
    return f"%{node.name} made of layer {1 - layer}"


def parameter_of_other_layer(draft: Draft) -> str:
    """Make a node read the corresponding parameter of the first layer."""
    places = {parameter_of(node).whole: node for node in parameters(draft.graph)}
    pairs = [
        (node, source, places[earlier])
        for node in draft.graph.nodes
        for source in node.all_input_nodes
        if source.op == "get_attr"
        and (layer := layer_of(source))
        and (earlier := renamed(parameter_of(source).whole, f".{layer}.", ".0.")) in places
        and type_of(places[earlier]) == type_of(source)
    ]
    node, source, other = draft.pick(pairs, "parameter like one of an earlier layer")
    node.replace_input_with(source, other)
    return f"%{node.name} reads %{other.name}"


def eps(draft: Draft) -> str:
    """Set eps to a value that shows in fp32, as values have a mean square of about one."""
    node = draft.pick(draft.calls(RMS_NORM, ADD_RMS_NORM), "norm")
    place = place_of(node, "eps")
    node.update_arg(place, 1e-2)
    return f"eps of %{node.name} is 1e-2"


def scale(draft: Draft) -> str:
    node = draft.pick(draft.attentions(), "attention")
    place = place_of(node, "scale")
    old = node.args[place]
    assert isinstance(old, float)
    node.update_arg(place, new := draft.pick([old * old, 1.0], "scale"))
    return f"scale of %{node.name} is {new}"


def window(draft: Draft) -> str:
    node = draft.pick(draft.attentions(), "attention")
    node.update_arg(place_of(node, "window"), wide := draft.pick([1, 2, 3], "window"))
    return f"window of %{node.name} is {wide}"


def rope_dropped(draft: Draft) -> str:
    node = draft.pick(draft.calls(ROPE), "rotation")
    return _skipped(node)


def rope_tables(draft: Draft) -> str:
    node = draft.pick(draft.calls(ROPE), "rotation")
    node.args = (node.args[0], node.args[2], node.args[1])
    return f"%{node.name} with sine for cosine"


def norm_dropped(draft: Draft) -> str:
    return _skipped(draft.pick(draft.calls(RMS_NORM), "norm"))


def _skipped(node: fx.Node) -> str:
    node.replace_all_uses_with(operand(node))
    node.graph.erase_node(node)
    return f"%{node.name} dropped"


def norms_swapped(draft: Draft) -> str:
    """Give queries the norm weight of keys, or a layer norm that of another layer norm."""
    norms = draft.calls(RMS_NORM, ADD_RMS_NORM)
    pairs = [
        (a, b)
        for a in norms
        for b in norms
        if (other := operand(b, place_of(b, "weight"))) < a
        and (weight := operand(a, place_of(a, "weight"))) is not other
        and type_of(weight) == type_of(other)
    ]
    node, other = draft.pick(pairs, "two norms of one type")
    node.update_arg(place_of(node, "weight"), operand(other, place_of(other, "weight")))
    return f"%{node.name} with the scale of %{other.name}"


def residual(draft: Draft) -> str:
    """Take the residual from before the layer, or from after its norm."""
    node = draft.pick(draft.calls(ADD_RMS_NORM, aten.add.Tensor), "residual sum")
    old = operand(node)
    earlier = [
        value
        for value in draft.graph.nodes
        if value < node
        and value.op == "call_function"
        and value is not old
        and value is not node.args[1]
        and value.meta["type"] == old.meta["type"]
        and not isinstance(value.meta["type"], tuple)
    ]
    if not earlier:
        raise UnfitError("no other value is like the residual")
    new = draft.pick(earlier, "value")
    node.update_arg(0, new)
    return f"%{node.name} adds to %{new.name} instead of %{old.name}"


def sequences_joined(draft: Draft) -> str:
    """Pass attention the rows of logits as the starts of the sequences."""
    node = draft.pick(draft.attentions(), "attention")
    rows = next(n for n in draft.graph.nodes if n.op == "placeholder" and n.name == "logit_rows")
    node.update_arg(place_of(node, "starts"), rows)
    return f"%{node.name} takes logit_rows for starts"
