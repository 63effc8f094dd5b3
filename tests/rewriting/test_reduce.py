"""A graph on which a pass fails is reduced to a few nodes with the same error."""

from __future__ import annotations

import pytest
from torch import fx

from tests.captures import captured_once
from tests.rewriting.broken import Divide, DropGates, SkipNorm
from tests.stages import until
from tpcompile.errors import UsageError
from tpcompile.frontend import parse_graph
from tpcompile.frontend.rotary import SavedTables
from tpcompile.ir.checker import check_graph
from tpcompile.ir.info import info_of
from tpcompile.ir.text import format_graph
from tpcompile.passes import default_pipeline, run_passes
from tpcompile.rewriting.failures import error_of_numbers, error_of_passes
from tpcompile.rewriting.reduce import Reducer

MOST_NODES = 15


@pytest.fixture(scope="module")
def graph() -> fx.GraphModule:
    """Return a graph of two layers, with all ops raised."""
    captured = captured_once("preset:tiny-qwen3").graph
    return run_passes(captured, until(default_pipeline(), "raise-attention"))[0]


def _checked(reducer: Reducer, graph: fx.GraphModule) -> fx.GraphModule:
    """Reduce a graph; assert that the result is valid and small, and can be read back."""
    before = format_graph(graph)
    smaller = reducer.reduce(graph)
    assert format_graph(graph) == before
    assert check_graph(smaller) == []
    assert len(smaller.graph.nodes) <= MOST_NODES < len(graph.graph.nodes)
    text = format_graph(smaller)
    assert format_graph(parse_graph(text)) == text
    return smaller


def test_an_invalid_graph_is_reduced_to_the_op_that_breaks_the_rule(graph: fx.GraphModule) -> None:
    reducer = Reducer(error_of_passes([DropGates()]))
    smaller = _checked(reducer, graph)
    assert reducer.error == "drop-gates: swiglu"
    text = format_graph(smaller)
    assert text.count("tpc.swiglu") == 1
    assert not any(op in text for op in ("attention", "rotary", "rms_norm", "plan\n"))


def test_an_exception_is_the_same_if_its_class_and_function_are(graph: fx.GraphModule) -> None:
    reducer = Reducer(error_of_passes([Divide()]))
    _checked(reducer, graph)
    assert reducer.error == "divide: ZeroDivisionError in apply"


def test_wrong_numbers_are_reduced_to_the_layer_that_is_wrong(graph: fx.GraphModule) -> None:
    """Values do not become inputs, because an input would have no numbers."""
    tables = SavedTables(info_of(graph).rotary)
    reducer = Reducer(error_of_numbers([SkipNorm()], tables, 1e-3), inputs=False)
    smaller = _checked(reducer, graph)
    assert reducer.error == "wrong numbers"
    inputs = [node.name for node in smaller.graph.nodes if node.op == "placeholder"]
    assert inputs == ["input_ids", "logit_rows"]
    assert "layer 1\n" in format_graph(smaller) and "layer 0\n" not in format_graph(smaller)


def test_progress_is_reported(graph: fx.GraphModule) -> None:
    progress: list[tuple[int, int]] = []
    reducer = Reducer(error_of_passes([DropGates()]), follow=lambda *pair: progress.append(pair))
    smaller = reducer.reduce(graph)
    nodes, tries = zip(*progress, strict=True)
    assert list(nodes) == sorted(nodes, reverse=True)
    assert nodes[-1] == len(smaller.graph.nodes)
    assert tries[-1] <= reducer.tries


def test_a_graph_without_an_error_is_refused(graph: fx.GraphModule) -> None:
    with pytest.raises(UsageError, match="There is no error to reduce"):
        Reducer(error_of_passes(until(default_pipeline(), "raise-norm"))).reduce(graph)
