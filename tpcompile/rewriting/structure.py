"""Structure recovered from data flow, never from names: projections, heads, blocks."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from tpcompile.errors import ShardingError
from tpcompile.ir.activations import OtherMlp, activations
from tpcompile.ir.info import model_of
from tpcompile.ir.meta import operand, origin_of
from tpcompile.ir.ops import (
    ATTENTION,
    CAUSAL_CONV,
    DECODE_OPS,
    DELTA_DECAY,
    EMBEDDINGS,
    EXPERTS,
    GATED_DELTA_RULE,
    GATED_RMS_NORM,
    LINEAR,
    RMS_NORM,
    ROPE,
    ROPE_PAIRS,
    SIGMOID_GATE,
    SPECS,
    SWIGLU,
    TOP_EXPERTS,
    arguments_of,
    op_name,
    package_of,
)
from tpcompile.ir.text import format_node

aten = torch.ops.aten

_PER_HEAD = (ROPE, ROPE_PAIRS, RMS_NORM)


@dataclass(frozen=True)
class AttentionBlock:
    """An attention op and the linears around it, one of them for an output gate if it has one."""

    attention: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    gate: fx.Node | None
    output: fx.Node


@dataclass(frozen=True)
class DeltaBlock:
    """A gated delta rule, and the linears and parameters around it."""

    rule: fx.Node
    conv: fx.Node
    """The convolution, whose channels are those of queries, keys and values, in this order."""
    inputs: fx.Node
    """The linear of these channels."""
    decay: fx.Node
    """The call of `delta_decay`, with a rate and a bias per value head."""
    a: fx.Node
    """The linear that the decay reads."""
    beta: fx.Node
    gate: fx.Node
    output: fx.Node


@dataclass(frozen=True)
class MlpBlock:
    """An activation and the linears around it; `gate` is None in an MLP without a gate."""

    activated: fx.Node
    """The input of the down projection."""
    gate: fx.Node | None
    up: fx.Node
    down: fx.Node


@dataclass(frozen=True)
class ExpertBlock:
    """A mixture of experts: its router, its experts, and an MLP that every token passes, if any."""

    experts: fx.Node
    choice: fx.Node
    """The call of `top_experts`."""
    router: fx.Node
    """The linear of the logits."""
    shared: fx.Node | None
    """The last linear of this MLP."""
    shared_gate: fx.Node | None
    """The linear of the gate that the result of the shared MLP is multiplied by."""
    total: fx.Node
    """The sum of all results."""


def head_ops(heads: fx.Node) -> list[fx.Node]:
    """Return the chain from an operand of attention back to the op that makes its heads."""
    chain = [heads]
    while chain[-1].target in _PER_HEAD:
        chain.append(operand(chain[-1]))
    return chain


def attention_blocks(graph: fx.Graph) -> list[AttentionBlock]:
    return [_attention_block(node) for node in graph.nodes if node.target is ATTENTION]


def mlp_blocks(graph: fx.Graph) -> list[MlpBlock]:
    """Return the MLPs of a graph, first with SwiGLU, then with other activations."""
    gated = [_mlp_block(node) for node in graph.nodes if node.target is SWIGLU]
    return gated + [_other_mlp_block(mlp) for mlp in activations(graph)]


def expert_blocks(graph: fx.Graph) -> list[ExpertBlock]:
    """Return the mixtures of experts of a graph."""
    return [_expert_block(node) for node in graph.nodes if node.target is EXPERTS]


def delta_blocks(graph: fx.Graph) -> list[DeltaBlock]:
    return [_delta_block(node) for node in graph.nodes if node.target is GATED_DELTA_RULE]


def _attention_block(node: fx.Node) -> AttentionBlock:
    query, key, value = (_projection(node, operand) for operand in node.args[:3])
    merged = _only_user(node, aten.flatten.using_ints)
    (user,) = merged.users if len(merged.users) == 1 else (merged,)
    gate = None
    if user.target is SIGMOID_GATE and operand(user) is merged:
        gate, merged = _projection(node, operand(user, 1)), user
    return AttentionBlock(node, query, key, value, gate, _only_user(merged, LINEAR))


def _delta_block(node: fx.Node) -> DeltaBlock:
    bound = arguments_of(node)
    parts = [_expect(bound[name], aten.unflatten.int, node, "heads") for name in "qkv"]
    items = [_expect(operand(part), operator.getitem, node, "channels") for part in parts]
    split = _expect(operand(items[0]), aten.split_with_sizes.default, node, "channels")
    if [(operand(item), item.args[1]) for item in items] != [(split, place) for place in range(3)]:
        raise ShardingError(
            f"%{node.name} cannot be sharded: its channels must be one value split in three",
            where=str(origin_of(node)),
            got=format_node(split),
            expected="the channels of queries, keys and values, side by side in this order",
        )
    conv = _expect(operand(split), CAUSAL_CONV, node, "channels")
    decay = _expect(bound["decay"], DELTA_DECAY, node, "a decay")
    sigmoid = _expect(bound["beta"], aten.sigmoid.default, node, "a share")
    norm = _only_user(node, GATED_RMS_NORM)
    return DeltaBlock(
        node,
        conv,
        _expect(operand(conv), LINEAR, node, "the projection of its channels"),
        decay,
        _expect(operand(decay), LINEAR, node, "the projection of its decay"),
        _expect(operand(sigmoid), LINEAR, node, "the projection of its share"),
        _projection(node, operand(norm, 1)),
        _only_user(_only_user(norm, aten.flatten.using_ints), LINEAR),
    )


def _expert_block(node: fx.Node) -> ExpertBlock:
    bound = arguments_of(node)
    items = [_expect(bound[name], operator.getitem, node, "a choice") for name in ("scores", "ids")]
    choices = {operand(item) for item in items}
    choice = _expect(choices.pop(), TOP_EXPERTS, node, "a choice")
    if choices or [item.args[1] for item in items] != [0, 1]:
        raise ShardingError(
            f"%{node.name} cannot be sharded: its scores and numbers must be of one choice",
            where=str(origin_of(node)),
            got=", ".join(map(format_node, items)),
            expected="both results of one tpc.top_experts",
        )
    router = _expect(operand(choice), LINEAR, node, "the logits of its router")
    shared = _shared_expert(node)
    if shared is None:
        return ExpertBlock(node, choice, router, None, None, node)
    return ExpertBlock(node, choice, router, *shared)


def _shared_expert(experts: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """Return the linear whose gated result is added to that of experts, its gate, and the sum."""
    (total,) = experts.users if len(experts.users) == 1 else (experts,)
    if total.target is not aten.add.Tensor:
        return None
    gated = next((value for value in total.all_input_nodes if value is not experts), experts)
    if gated.target is not aten.mul.Tensor:
        return None
    gates = [value for value in gated.all_input_nodes if value.target is aten.sigmoid.default]
    results = [value for value in gated.all_input_nodes if value.target is LINEAR]
    if len(gates) != 1 or len(results) != 1 or operand(results[0]).target is not SWIGLU:
        return None
    gate = _expect(operand(gates[0]), LINEAR, experts, "the gate of the shared expert")
    return results[0], gate, total


def _projection(attention: fx.Node, operand: object) -> fx.Node:
    assert isinstance(operand, fx.Node)
    heads = head_ops(operand)[-1]
    source = heads.args[0] if heads.target is aten.unflatten.int else heads
    assert isinstance(source, fx.Node)
    if source.target is RMS_NORM:
        raise ShardingError(
            f"{model_of(attention.graph)} normalises all heads together, "
            "so the projection of its heads is not a separate linear",
            where=str(origin_of(source)),
            got=format_node(source),
            expected="a norm per head",
        )
    return _expect(source, LINEAR, attention, "the projection of its heads")


def _mlp_block(node: fx.Node) -> MlpBlock:
    gate, up = (_expect(operand, LINEAR, node, "a projection") for operand in node.args)
    return MlpBlock(node, gate, up, _only_user(node, LINEAR))


def _other_mlp_block(mlp: OtherMlp) -> MlpBlock:
    result = mlp.result
    *gates, up = (_expect(p, LINEAR, result, "a projection") for p in mlp.projections)
    return MlpBlock(result, gates[0] if gates else None, up, _only_user(result, LINEAR))


def _expect(source: object, target: object, reader: fx.Node, role: str) -> fx.Node:
    assert isinstance(source, fx.Node)
    if source.target is not target:
        wanted = "a separate linear" if target is LINEAR else f"a result of {SPECS[target].name}"
        subject = f"%{reader.name} of {model_of(reader.graph)}"
        raise ShardingError(
            f"{subject} cannot be sharded: {role} must be {wanted}",
            where=str(origin_of(source)),
            got=format_node(source),
            expected=f"{role} as {SPECS[target].name}",
            hint=_of_plugin(source),
        )
    return source


def _of_plugin(*nodes: fx.Node) -> str:
    """Return a sentence that names the package of an unsupported op, or an empty string."""
    for node in nodes:
        package = package_of(node)
        if package:
            return (
                f"{op_name(node)} is an op of the package {package}: put the pass that makes it "
                "after shard-linears"
            )
    return ""


def _only_user(node: fx.Node, target: object) -> fx.Node:
    users: list[fx.Node] = list(node.users)
    if len(users) != 1 or users[0].target is not target:
        summed = target is LINEAR
        reader = "linear" if summed else SPECS[target].name
        raise ShardingError(
            f"%{node.name} cannot be sharded: its result must go to exactly one {reader}",
            where=str(origin_of(node)),
            got=", ".join(f"{op_name(user)} %{user.name}" for user in users),
            expected=f"one {reader}{' that sums over the sharded axis' if summed else ''}",
            hint=_of_plugin(*users),
        )
    return users[0]


def embedding_of(graph: fx.Graph) -> fx.Node:
    """Return the embedding that looks up the token ids."""
    embeddings: list[fx.Node] = [n for n in graph.nodes if n.target in EMBEDDINGS]
    if len(embeddings) != 1:
        raise ShardingError(f"The graph has {len(embeddings)} embeddings", expected="exactly one")
    return embeddings[0]


def output_of(graph: fx.Graph) -> fx.Node:
    output: fx.Node = next(node for node in reversed(graph.nodes) if node.op == "output")
    return output


def head_of(graph: fx.Graph) -> fx.Node:
    """Return the linear that computes the logits."""
    head: object = operand(output_of(graph))
    while isinstance(head, fx.Node) and head.target not in (LINEAR, *DECODE_OPS) and head.args:
        head = head.args[0]
    if not isinstance(head, fx.Node) or head.target is not LINEAR:
        raise ShardingError("The logits do not come from a linear", expected="a linear LM head")
    return head


def weight_of(linear: fx.Node) -> fx.Node:
    return operand(linear, 1)


def bias_of(linear: fx.Node) -> fx.Node | None:
    bias = linear.args[2] if len(linear.args) > 2 else None
    assert bias is None or isinstance(bias, fx.Node)
    return bias
