"""The head normalises and projects only the selected rows, in one op."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from tests.passes.decoding import decode_step
from tests.passes.graphs import GraphBuilder, nearest
from tests.passes.steps import step
from tpcompile.ir.checker import check_graph
from tpcompile.ir.meta import operand, value_type
from tpcompile.ir.ops import ALL_GATHER, ARGMAX, LINEAR, NORM_LINEAR, RMS_NORM
from tpcompile.passes.fuse_norm_linear import FuseNormLinear
from tpcompile.rewriting.rewrite import calls
from tpcompile.rewriting.structure import embedding_of, output_of, weight_of

aten = torch.ops.aten
WIDTH = 6


def head_graph(
    *, dim: int | None = 0, normed: bool = True, biased: bool = False, read: str = ""
) -> fx.GraphModule:
    """Return a head on rows selected from a norm; `read` names a value added to the result."""
    builder = GraphBuilder()
    x = builder.input("x", "R", WIDTH)
    values = {
        "norm": builder.call(RMS_NORM, x, builder.parameter("scale", WIDTH), 1e-6) if normed else x
    }
    values["picked"] = values["norm"]
    if dim is not None:
        shape = "R" if dim == 0 else WIDTH
        rows = builder.input("rows", shape, dtype=torch.int64)
        picked = builder.call(aten.index_select.default, values["norm"], dim, rows)
        values["picked"] = picked
    result = builder.linear(values["picked"], "head", 9, WIDTH, biased)
    if read:
        added = builder.call(aten.neg.default, values[read])
        result = builder.call(aten.add.Tensor, result, builder.linear(added, "other", 9, WIDTH))
    return builder.done(result)


def numbered(gm: fx.GraphModule) -> fx.GraphModule:
    for name, parameter in list(gm.named_parameters()):
        numbers = torch.randn(parameter.shape)
        gm.register_parameter(name, torch.nn.Parameter(numbers, requires_grad=False))
    gm.recompile()
    return gm


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3"])
def test_matches_the_head(model: str, tp: int) -> None:
    """The head's norm is the last one left; a tied weight remains a single parameter."""
    current = decode_step("fuse-norm-linear", model, tp).plain
    gm = current.after.graph
    assert current.matches == 1
    assert not calls(gm, RMS_NORM)
    (head,) = calls(gm, NORM_LINEAR)
    assert operand(head, 3) is operand(embedding_of(gm.graph))
    assert operand(calls(gm, ARGMAX)[0]) is head
    assert (operand(output_of(gm.graph)).target is ALL_GATHER) == (tp > 1)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dim", [0, None])
def test_rows_are_picked_first(dim: int | None, biased: bool) -> None:
    gm = numbered(head_graph(dim=dim, biased=biased))
    inputs = [torch.randn(5, WIDTH), *([torch.tensor([4, 1])] if dim == 0 else [])]
    before = gm(*inputs)
    assert FuseNormLinear().apply(gm).matches == 1
    assert check_graph(gm) == []
    (fused,) = calls(gm, NORM_LINEAR)
    picked = operand(fused).target is aten.index_select.default
    assert picked == (dim == 0)
    gm.recompile()
    torch.testing.assert_close(gm(*inputs), before, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (head_graph(normed=False), "its input %x is not an RMS norm"),
        (head_graph(read="norm"), "%neg also reads it"),
        (head_graph(read="picked"), "%neg also reads it"),
        (head_graph(dim=1), "it selects along the normed dimension"),
    ],
    ids=["no norm", "the norm is read", "the rows are read", "columns are picked"],
)
def test_near_miss_is_left_alone(graph: fx.GraphModule, reason: str) -> None:
    before = [node.name for node in graph.graph.nodes]
    assert reason in nearest(FuseNormLinear().apply(graph))
    assert [node.name for node in graph.graph.nodes] == before
    assert check_graph(graph) == []


def test_a_weight_with_a_role_is_left_alone() -> None:
    """The fused op takes rows in the checkpoint's order, not those of reordered heads."""
    passes = "canonicalize,raise-norm,raise-rope,raise-attention,interleave-rotary,fuse-qkv"
    gm = step("fuse-norm-linear", tp=1, pipeline=f"{passes},fuse-norm-linear").after.graph
    roles = [value_type(weight_of(node)).role for node in calls(gm, LINEAR)]
    assert any(roles)
    assert not any(value_type(operand(node, 3)).role for node in calls(gm, NORM_LINEAR))
