"""Needs: without a collective, exactly the readers that the page names break the named rules."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import fx

import tpcompile
from tests.inspect.explorer.recorded import recorded
from tpcompile.inspect.explorer.needs import needs_of, rule_of
from tpcompile.ir.checker import check_graph
from tpcompile.ir.ops import ALL_GATHER, ALL_REDUCE, spec_of
from tpcompile.rewriting.manager import clone
from tpcompile.rewriting.rewrite import calls


def problems_without(gm: fx.GraphModule, collective: str, reader: str) -> list[dict[str, str]]:
    """Return what the checker says of a reader if it reads the operand of a collective itself."""
    broken = clone(gm)
    nodes = {node.name: node for node in broken.graph.nodes}
    source = nodes[collective].args[0]
    assert isinstance(source, fx.Node)
    nodes[reader].replace_input_with(nodes[collective], source)
    problems = [problem for problem in check_graph(broken) if problem.node == reader]
    return [
        {"reader": p.node, "rule": p.rule, "got": p.got, "expected": p.expected} for p in problems
    ]


@pytest.mark.parametrize("model", ["qwen3 tp=4", "qwen2 tp=3"])
@pytest.mark.parametrize("step", [False, True])
def test_needs_are_what_the_checker_finds(model: str, step: bool) -> None:
    gm = recorded(model).step if step else recorded(model).prompt
    kinds = set()
    for node in gm.graph.nodes:
        spec = spec_of(node)
        if spec is None or spec.across is None:
            assert needs_of(node) == []
            continue
        kinds.add(node.target)
        needs = {need["reader"]: need for need in needs_of(node)}
        for reader in node.users:
            problems = problems_without(gm, node.name, reader.name)
            if reader.op == "output":
                assert problems and needs[reader.name]["rule"] == problems[0]["rule"] == "result"
            else:
                wanted = [need for need in [needs.get(reader.name)] if need]
                assert wanted == problems[:1], (node.name, reader.name)
    assert len(kinds) > 1


def test_every_sum_and_gather_is_needed() -> None:
    gm = recorded("qwen3 tp=4").prompt
    collectives = [*calls(gm, ALL_REDUCE), *calls(gm, ALL_GATHER)]
    assert len(collectives) == 10
    assert all(needs_of(node) for node in collectives)


def test_rules_are_where_they_are_said_to_be() -> None:
    root = Path(tpcompile.__file__).parents[1]
    places = set()
    for node in recorded("qwen3 tp=4").step.graph.nodes:
        rule = rule_of(node)
        if not node.op.startswith("call"):
            assert rule is None
            continue
        assert rule is not None, node.name
        name, file, line = rule
        text = (root / file).read_text().splitlines()
        # a decorated rule begins at its decorator, and a lambda is in a longer line
        near = "\n".join(text[line - 1 : line + 3])
        assert f"def {name}(" in near or ("lambda" in name and "lambda" in near), rule
        places |= {file, name}
    assert len(places) > 8
    assert "norm_linear" in places, "the rule of a composite op is its body"
