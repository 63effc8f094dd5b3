"""Names of values within expressions: exact ones, and none that are wrong."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from transformers import AutoConfig

from tests.captures import captured_once
from tpcompile.ir.values.expressions import Expressions
from tpcompile.ir.values.named import Names
from tpcompile.ir.values.shown import differences, shown
from tpcompile.ir.values.value import Value, own_indices, reshaped, sliced, transposed
from tpcompile.passes import parse_pipeline, run_passes
from tpcompile.passes.pipeline import for_ranks
from tpcompile.presets import preset


@lru_cache
def _values() -> tuple[Expressions, dict[str, Value]]:
    config = AutoConfig.for_model(**preset("tiny-qwen3"))
    captured = captured_once(config, dtype=torch.float32).graph
    gm, _ = run_passes(captured, for_ranks(parse_pipeline("standard"), 2))
    expressions = Expressions()
    nodes = expressions.of(gm).nodes
    calls = {node: value for node, value in nodes.items() if node.op == "call_function"}
    return expressions, {n.name: value for n, value in calls.items() if isinstance(value, Value)}


def _names(*names: str) -> Names:
    expressions, values = _values()
    return Names(expressions.terms, {name: values[name] for name in names})


@pytest.mark.parametrize("layer", [0, 1])
def test_views_of_a_value_have_its_name(layer: int) -> None:
    expressions, values = _values()
    name = f"l{layer}_k_normed"
    terms, value = expressions.terms, values[name]
    for view, text in (
        (value, f"%{name}[i, j, l]"),
        (transposed(terms, value, 0, 1), f"%{name}[j, i, l]"),
        (sliced(terms, value, 2, 8, 8), f"%{name}[i, j, l + 8]"),
        (sliced(terms, transposed(terms, value, 1, 2), 1, 3, 4), f"%{name}[i, l, j + 3]"),
    ):
        assert shown(view.body, naming=_names(name)) == text
        assert name not in shown(view.body)


def test_another_value_does_not_have_the_name() -> None:
    _, values = _values()
    for name, other in (("k", "v"), ("q_normed", "k_normed"), ("gate_proj", "up_proj")):
        text = shown(values[f"l0_{name}"].body, naming=_names(f"l0_{other}"))
        assert f"%l0_{other}[" not in text
    for name in ("k", "gate_proj"):
        assert f"%l0_{name}[" not in shown(values[f"l1_{name}"].body, 1, _names(f"l0_{name}"))


def test_parts_with_another_number_of_indices_do_not_have_the_name() -> None:
    """Such as a matrix in place of a scale, deeper than the likeness of terms reaches."""
    expressions, _ = _values()
    terms = expressions.terms

    def value(indices: int) -> Value:
        source = terms.source("input", (f"x{indices}", None), torch.float32)
        body = terms.read(source, own_indices((4, 6))[:indices])
        for head in ("exp", "silu", "exp", "silu"):
            body = terms.element(head, [body], torch.float32)
        return Value((4, 6)[:indices], torch.float32, body)

    naming = Names(terms, {"x": value(2)})
    assert "%x[" not in shown(value(1).body, 9, naming)


def test_reshaped_values_have_the_name() -> None:
    expressions, values = _values()
    value = reshaped(expressions.terms, values["l0_up_proj"], ("T", 22, 8))
    assert shown(value.body, naming=_names("l0_up_proj")) == "%l0_up_proj[i, 8j + l]"


def test_a_difference_ends_at_values_with_names() -> None:
    expressions, values = _values()
    naming = _names("l0_o_proj", "embedding")
    before, after = (
        expressions.terms.element("silu", [values[name].body], torch.float32)
        for name in ("embedding", "l0_o_proj")
    )
    pair = differences(before, after, naming)[-1]
    assert [shown(term, naming=naming) for term in pair] == ["%embedding[i, j]", "%l0_o_proj[i, j]"]
    deep = differences(values["l0_residual"].body, values["l0_o_proj"].body)[-1]
    assert deep == (values["l0_residual"].body, values["l0_o_proj"].body)


def test_operands_are_shown_in_an_order_of_their_own() -> None:
    expressions, values = _values()
    terms = expressions.terms
    gate, up = (values[f"l0_{name}"].body for name in ("gate_proj", "up_proj"))
    for operands in ((gate, up), (up, gate)):
        text = shown(terms.element("sub", operands, torch.float32), 1)
        total = shown(terms.element("add", operands, torch.float32), 1)
        assert text == "… - …" and total == "… + …"
    naming = _names("l0_gate_proj", "l0_up_proj")
    texts = {
        shown(terms.element("mul", operands, torch.float32), naming=naming)
        for operands in ((gate, up), (up, gate))
    }
    assert texts == {"%l0_gate_proj[i, j] · %l0_up_proj[i, j]"}
