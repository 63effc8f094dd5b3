"""The ops from residual to rotated queries are fused; attention then reads the cache."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import fx

from tests.backends.reference.step_models import APART
from tests.passes.decoding import BATCHES, decode_stages, decode_step, filled, run_step
from tests.passes.graphs import GraphBuilder
from tests.vm.groups.lowered import graph
from tpcompile.ir.checker import check_graph
from tpcompile.ir.meta import operand, parameter_of, parameters
from tpcompile.ir.ops import (
    CACHED_ATTENTION,
    LINEAR,
    NORM_Q_K_V_ROPE_APPEND,
    NORM_QKV_ROPE_APPEND,
    PAGED_ATTENTION,
    RMS_NORM,
    ROPE,
    SPECS,
    arguments_of,
)
from tpcompile.passes.fuse_norm_qkv import FuseNormQkv
from tpcompile.rewriting.manager import clone
from tpcompile.rewriting.rewrite import calls, insert_after

aten = torch.ops.aten
NAMES = SPECS[NORM_QKV_ROPE_APPEND].argument_names


@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
def test_golden(model: str, golden: Callable[[str, str], None]) -> None:
    diff = decode_step("fuse-norm-qkv", model).plain.diff()
    golden(f"passes/fuse_norm_qkv_{model}.txt", diff)


@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
def test_matches_one_a_layer(model: str) -> None:
    current = decode_step("fuse-norm-qkv", model).plain
    assert current.matches == 2
    gm = current.after.graph
    assert not calls(gm, PAGED_ATTENTION) and not calls(gm, ROPE)
    assert len(calls(gm, CACHED_ATTENTION)) == 2


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
def test_numbers(model: str, tp: int) -> None:
    """Numbers agree over a filled cache, with uneven heads and shared KV heads."""
    step = decode_step("fuse-norm-qkv", model, tp)
    step.assert_same_bits()
    step.assert_near()


def test_again() -> None:
    assert decode_step("fuse-norm-qkv").plain.again().matches == 0


@pytest.mark.parametrize(("model", "biased", "normed"), [
    ("tiny-qwen2", True, False),
    ("tiny-qwen3", False, True),
])  # fmt: skip
def test_bias_and_norms_of_heads_are_kept(model: str, biased: bool, normed: bool) -> None:
    """Trap 5: biases and per-head norms are neither dropped nor invented."""
    gm = decode_step("fuse-norm-qkv", model, 3).after.graph
    for node in calls(gm, NORM_QKV_ROPE_APPEND):
        arguments = arguments_of(node)
        assert (arguments["bias"] is not None) == biased
        assert (arguments["q_norm"] is not None) == (arguments["k_norm"] is not None) == normed
        assert arguments["heads"] == [6, 2, 2]


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_queries_keys_and_values_may_have_a_weight_each(tp: int) -> None:
    """Each part has its own weight and bias."""
    nodes = calls(graph(APART, tp, 2, False), NORM_Q_K_V_ROPE_APPEND)
    assert len(nodes) == 2
    for layer, node in enumerate(nodes):
        arguments = arguments_of(node)
        for part in "qkv":
            names = [str(arguments[f"{part}_{name}"].target) for name in ("weight", "bias")]
            assert names == [f"l{layer}_{part}_proj_weight", f"l{layer}_{part}_proj_bias"]


@pytest.mark.parametrize("name", ["bias", "weight"])
def test_the_bias_of_another_part_is_refused(name: str) -> None:
    """Trap 5: keys and values have the same shapes, so only the recipes tell them apart."""
    gm = clone(graph(APART, 2, 2, False))
    names = list(SPECS[NORM_Q_K_V_ROPE_APPEND].argument_names)
    node = calls(gm, NORM_Q_K_V_ROPE_APPEND)[1]
    k, v = (names.index(f"{part}_{name}") for part in "kv")
    keys, values = node.args[k], node.args[v]
    node.update_arg(k, values)
    node.update_arg(v, keys)
    assert {problem.rule for problem in check_graph(gm)} == {"bias-owner"}


def test_the_step_s_own_keys_are_read_from_the_cache() -> None:
    """Trap 13: attention sees only the keys that the fused op appended to its layer."""
    gm = clone(decode_step("fuse-norm-qkv", tp=1).after.graph)
    place = NAMES.index("layer")
    for node in calls(gm, NORM_QKV_ROPE_APPEND):
        node.update_arg(place, 1 - node.args[place])  # type: ignore[operator]
    problems = check_graph(gm)
    assert {problem.rule for problem in problems} == {"kv-cache"}
    assert any("of the cache before any write" in problem.got for problem in problems)
    prefill = filled("tiny-qwen3", 1, BATCHES[1])
    pair = decode_step("fuse-norm-qkv", tp=1).plain.pair
    assert bool(run_step(gm, pair, prefill.inputs, prefill.kept).logits.isnan().any())


# Near misses: one layer is changed, the other one still matches.


def _first(gm: fx.GraphModule, target: object) -> fx.Node:
    return next(node for node in gm.graph.nodes if node.target is target)


def _norm_is_the_residual(gm: fx.GraphModule) -> None:
    """Use the norm as the residual, as in models that normalise before the branch."""
    norm = _first(gm, RMS_NORM)
    _first(gm, aten.add.Tensor).update_arg(0, norm)


def _queries_are_read(gm: fx.GraphModule) -> None:
    insert_after(_first(gm, ROPE), aten.neg.default, _first(gm, ROPE))


def _another_eps(gm: fx.GraphModule) -> None:
    operand(_first(gm, PAGED_ATTENTION), 1).args[0].update_arg(2, 1e-3)  # type: ignore[union-attr]


def _keys_rotate_the_other_way(gm: fx.GraphModule) -> None:
    keys = operand(_first(gm, PAGED_ATTENTION), 1)
    keys.args = (keys.args[0], keys.args[2], keys.args[1])


def _keys_do_not_rotate(gm: fx.GraphModule) -> None:
    attention = _first(gm, PAGED_ATTENTION)
    attention.update_arg(1, operand(operand(attention, 1)))


def _only_keys_are_interleaved(gm: fx.GraphModule) -> None:
    keys = operand(_first(gm, PAGED_ATTENTION), 1)
    keys.args = (*keys.args, True)


def _keys_and_values_change_places(gm: fx.GraphModule) -> None:
    split = _first(gm, aten.split_with_sizes.default)
    keys, values = (n for n in split.users if n.target is operator.getitem and n.args[1] != 0)
    keys.args, values.args = values.args, keys.args


def _not_normed(gm: fx.GraphModule) -> None:
    norm = _first(gm, RMS_NORM)
    norm.replace_all_uses_with(operand(norm))
    gm.graph.erase_node(norm)


def _not_projected(gm: fx.GraphModule) -> None:
    linear = _first(gm, LINEAR)
    behind = insert_after(linear, aten.neg.default, linear)
    linear.replace_all_uses_with(behind, delete_user_cb=lambda user: user is not behind)


NEAR_MISSES: dict[str, tuple[Callable[[fx.GraphModule], None], str]] = {
    "the normed value is the residual": (_norm_is_the_residual, "%l0_residual also reads it"),
    "queries are read elsewhere": (_queries_are_read, "%neg also reads it"),
    "keys have another norm": (
        _another_eps,
        "its head norms must have the same epsilon, got [1e-06, 0.001]",
    ),
    "keys rotate the other way": (_keys_rotate_the_other_way, "cos is already bound to %cos"),
    "keys rotate in other pairs": (
        _only_keys_are_interleaved,
        "queries and keys are rotated in different layouts",
    ),
    "keys do not rotate": (_keys_do_not_rotate, "expected tpc.rope, got tpc.rms_norm"),
    "keys and values are swapped": (_keys_and_values_change_places, "expected 1, got 2"),
    "the residual is not normed": (_not_normed, "is not an RMS norm"),
    "the rows come from elsewhere": (_not_projected, "it is not a linear"),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss_is_left_alone(name: str) -> None:
    change, reason = NEAR_MISSES[name]
    gm = clone(decode_step("fuse-norm-qkv", tp=1).before.graph)
    change(gm)
    report = FuseNormQkv().apply(gm)
    assert report.matches == 1
    assert reason in str(report.nearest)
    assert report.nearest is not None and report.nearest.node is not None
    assert len(calls(gm, PAGED_ATTENTION)) == len(calls(gm, CACHED_ATTENTION)) == 1
    rules = ["head-order"] if change is _only_keys_are_interleaved else []
    assert [problem.rule for problem in check_graph(gm)] == rules


def test_a_graph_without_attention_has_nothing_to_fuse() -> None:
    builder = GraphBuilder()
    gm = builder.done(builder.linear(builder.input("x", "T", 4), "w", 4, 4))
    report = FuseNormQkv().apply(gm)
    assert (report.matches, report.nearest) == (0, None)


def test_the_parameters_stay_as_they_are() -> None:
    """The pass changes neither recipes nor shards of any parameter."""
    stages = decode_stages("tiny-qwen3", 3, 3)
    place = [stage.name for stage in stages].index("fuse-norm-qkv")
    before, after = (
        {node.target: parameter_of(node) for node in parameters(stage.graph.graph)}
        for stage in stages[place - 1 : place + 1]
    )
    assert before == after
