"""Errors of passes have a form that does not depend on names, numbers or the size of the graph."""

from __future__ import annotations

import pytest
from torch import fx

from tests.captures import captured_once
from tests.passes.graphs import GraphBuilder
from tests.rewriting.broken import Divide, DropGates, SkipNorm
from tests.stages import after, until
from tpcompile.errors import UsageError
from tpcompile.frontend.rotary import SavedTables
from tpcompile.ir.info import info_of
from tpcompile.passes import decode_pipeline, default_pipeline, run_passes
from tpcompile.passes.vocab_parallel import VocabParallel
from tpcompile.rewriting.failures import check_inputs, error_of_numbers, error_of_passes


@pytest.fixture(scope="module")
def graph() -> fx.GraphModule:
    captured = captured_once("preset:tiny-qwen3").graph
    return run_passes(captured, until(default_pipeline(), "raise-attention"))[0]


def test_errors_of_passes(graph: fx.GraphModule) -> None:
    assert error_of_passes(after(default_pipeline(2), "raise-attention"))(graph) == ""
    assert error_of_passes([DropGates()])(graph) == "drop-gates: swiglu"
    assert error_of_passes([Divide(), DropGates()])(graph) == "divide: ZeroDivisionError in apply"
    refused = error_of_passes([VocabParallel()])(graph)
    assert refused == "vocab-parallel: PassError The graph has no plan"


def test_right_passes_do_not_change_numbers(graph: fx.GraphModule) -> None:
    tables = SavedTables(info_of(graph).rotary)
    assert (
        error_of_numbers(after(default_pipeline(3), "raise-attention"), tables, 1e-3)(graph) == ""
    )
    assert error_of_numbers(after(decode_pipeline(2), "raise-attention"), tables, 1e-3)(graph) == ""


def test_wrong_numbers(graph: fx.GraphModule) -> None:
    tables = SavedTables(info_of(graph).rotary)
    assert error_of_numbers([SkipNorm()], tables, 1e-3)(graph) == "wrong numbers"
    assert error_of_numbers([SkipNorm(layer=9)], tables, 1e-3)(graph) == ""


def test_what_cannot_run_has_another_error_than_wrong_numbers(graph: fx.GraphModule) -> None:
    """A smaller graph on which a pass fails, or that cannot run, does not end a reduction."""
    no_tables = error_of_numbers([SkipNorm()], SavedTables(None), 1e-3)
    assert no_tables(graph) == "cannot be run: UnsupportedError in _new_tables"
    assert error_of_numbers([DropGates()], SavedTables(None), 1e-3)(graph) == "drop-gates: swiglu"


def test_inputs_without_numbers_are_refused(graph: fx.GraphModule) -> None:
    check_inputs(graph)
    builder = GraphBuilder()
    with pytest.raises(
        UsageError, match=r"Values for the input %x cannot be generated.*input_ids, positions"
    ):
        check_inputs(builder.done(builder.linear(builder.input("x", "T", 4), "w", 4, 4)))
