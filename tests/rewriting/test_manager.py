"""The manager checks the graph after each pass, names the failing pass, and records all stages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from torch import fx

from tests.models import Pair, preset_pair
from tests.passes.steps import STANDARD
from tests.stages import graph_after, until
from tpcompile.errors import PassError, ShardingError, UsageError, VerifyError
from tpcompile.ir.checker import check_graph
from tpcompile.ir.info import info_of
from tpcompile.ir.meta import operand, parameter_of, parameters, set_parameter
from tpcompile.ir.ops import ALL_REDUCE
from tpcompile.ir.problem import merged
from tpcompile.ir.text import format_graph
from tpcompile.passes import Pass, Report, Stats, default_pipeline, run_passes
from tpcompile.passes.plan_sharding import PlanSharding
from tpcompile.rewriting.manager import PASSES, FailedPassError, clone, describe, graph_pass
from tpcompile.rewriting.rewrite import calls


@dataclass(frozen=True)
class DropCollective:
    """Broken pass that removes a sum."""

    name: ClassVar[str] = "drop-collective"
    which: int = 0

    def apply(self, gm: fx.GraphModule) -> Report:
        node = calls(gm, ALL_REDUCE)[self.which]
        node.replace_all_uses_with(operand(node))
        gm.graph.erase_node(node)
        return Report(matches=1)


@dataclass(frozen=True)
class SwapShards:
    """Broken pass that gives each rank another rank's shards."""

    name: ClassVar[str] = "swap-shards"

    def apply(self, gm: fx.GraphModule) -> Report:
        for node in parameters(gm.graph):
            parameter = parameter_of(node)
            set_parameter(node, replace(parameter, shards=parameter.shards[::-1]))
        return Report(matches=1)


@dataclass(frozen=True)
class Explode:
    """Pass that raises an error of its own."""

    name: ClassVar[str] = "explode"
    loudly: int = 1

    def apply(self, gm: fx.GraphModule) -> Report:
        raise ZeroDivisionError("boom")


@pytest.fixture(scope="module")
def pair() -> Pair:
    return preset_pair("tiny-qwen3")


SUMMED = until(default_pipeline(2), "insert-collectives")


def _failure(pair: Pair, passes: list[Pass]) -> FailedPassError:
    with pytest.raises(FailedPassError) as failed:
        run_passes(pair.captured.graph, passes)
    return failed.value


def test_an_invalid_graph_names_the_pass_its_options_and_what_ran_before(pair: Pair) -> None:
    error = _failure(pair, [*SUMMED, DropCollective(which=1)])
    message = str(error)
    assert isinstance(error, PassError)
    assert "The pass drop-collective{which=1} left an invalid graph" in message
    assert "(after canonicalize, split-heads, raise-norm, " in message
    assert "plan-sharding{tp=2}, shard-linears, kv-heads, vocab-parallel, insert-coll" in message


def test_an_invalid_graph_shows_the_rule_the_place_and_the_line(pair: Pair) -> None:
    error = _failure(pair, [*SUMMED, DropCollective(which=1)])
    problem, message = error.problems[0], str(error)
    assert problem.rule == "partial-nonlinear"
    assert "model.layers.0 modeling_qwen3.py" in problem.source
    assert problem.line.startswith(f"%{problem.node} = aten.add(")
    for part in (problem.rule, problem.source, problem.line, problem.got, problem.expected):
        assert part in message
    assert "put the all_reduce before this node" in message.lower()
    assert problem.others == (), "the other sums have their collectives"


def test_three_problems_are_shown_and_the_others_counted(pair: Pair) -> None:
    error = _failure(pair, [*SUMMED, SwapShards()])
    assert {problem.rule for problem in error.problems} == {"recipe"}
    assert len(error.problems) > 3
    assert str(error).count("breaks the rule recipe") == 3
    assert f"and {len(merged(error.problems)) - 3} other problems" in str(error)


def test_the_first_pass_has_no_history(pair: Pair) -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        run_passes(pair.captured.graph, [Explode()])
    assert raised.value.__notes__ == ["in the pass explode, the first pass"]


def test_an_exception_of_a_pass_gets_a_note(pair: Pair) -> None:
    passes: list[Pass] = [*until(default_pipeline(2), "raise-norm"), Explode(loudly=2)]
    with pytest.raises(ZeroDivisionError, match="boom") as raised:
        run_passes(pair.captured.graph, passes)
    (note,) = raised.value.__notes__
    assert note == "in the pass explode{loudly=2}, after canonicalize, split-heads, raise-norm"


def test_a_refusal_says_in_which_pass(pair: Pair) -> None:
    with pytest.raises(ShardingError, match="tp=9 is more") as refused:
        run_passes(pair.captured.graph, default_pipeline(9))
    assert "(In the pass plan-sharding{tp=9}, after canonicalize, " in str(refused.value)
    assert refused.value.got == "6 query heads"


def test_instruments_are_called_after_every_pass_in_order(pair: Pair) -> None:
    events: list[tuple[str, str, int]] = []

    def instrument(tag: str, name: str, gm: fx.GraphModule, stats: Stats) -> None:
        assert stats.nodes_after == len(gm.graph.nodes)
        assert check_graph(gm) == []
        events.append((tag, name, stats.matches))

    _, stages = run_passes(
        pair.captured.graph,
        default_pipeline(2),
        [lambda *event: instrument("first", *event), lambda *event: instrument("second", *event)],
    )
    assert [(tag, name) for tag, name, _ in events] == [
        (tag, name) for name in STANDARD for tag in ("first", "second")
    ]
    assert [matches for tag, _, matches in events if tag == "first"] == [
        stage.stats.matches for stage in stages
    ]


def test_an_instrument_is_not_called_for_a_pass_that_failed(pair: Pair) -> None:
    names: list[str] = []
    with pytest.raises(ZeroDivisionError):
        run_passes(
            pair.captured.graph,
            [*until(default_pipeline(2), "canonicalize"), Explode()],
            [lambda name, *_: names.append(name)],
        )
    assert names == ["capture", "canonicalize"]


def test_the_captured_graph_is_left_as_it_was(pair: Pair) -> None:
    before = format_graph(pair.captured.graph)
    run_passes(pair.captured.graph, default_pipeline(3))
    assert format_graph(pair.captured.graph) == before
    assert info_of(pair.captured.graph).tp == 1
    assert info_of(pair.captured.graph).plan is None


def test_a_clone_is_a_graph_of_its_own(pair: Pair) -> None:
    gm = graph_after(pair, default_pipeline(2))
    copied = clone(gm)
    before = format_graph(gm)
    assert format_graph(copied) == before
    assert not set(copied.graph.nodes) & set(gm.graph.nodes)
    DropCollective().apply(copied)
    info_of(copied).tp = 5
    for node in copied.graph.nodes:
        node.meta["type"] = None
    assert format_graph(gm) == before
    assert info_of(gm).tp == 2


def test_describe_tells_options_that_are_not_the_default() -> None:
    assert describe(PlanSharding()) == "plan-sharding"
    assert describe(PlanSharding(tp=4, vocab_grain=8)) == "plan-sharding{tp=4,vocab_grain=8}"


def test_a_failed_pass_is_a_verify_error_too(pair: Pair) -> None:
    """A FailedPassError is a VerifyError, so users can catch invalid graphs by one class."""
    error = _failure(pair, [*SUMMED, DropCollective()])
    assert isinstance(error, VerifyError)
    first = error.problems[0]
    assert first.node in error.where
    assert (error.got, error.expected) == (first.got, first.expected)


def test_a_pass_must_report(pair: Pair) -> None:
    @dataclass(frozen=True)
    class Silent:
        name: ClassVar[str] = "silent"

        def apply(self, gm: fx.GraphModule) -> None:
            """Apply no changes, and return no report."""

    with pytest.raises(PassError, match="silent returned None"):
        run_passes(pair.captured.graph, [Silent()])  # type: ignore[list-item]


def test_a_failure_keeps_its_problems_at_another_place(pair: Pair) -> None:
    error = _failure(pair, [*SUMMED, DropCollective()])
    moved = error.at("rank 1")
    assert (moved.where, moved.problems) == ("rank 1", error.problems)
    assert "At rank 1." in str(moved) and error.where != "rank 1"


@dataclass(frozen=True)
class Named:
    """Pass whose name cannot be written in pipeline text."""

    name: ClassVar[str] = "my pass"

    def apply(self, gm: fx.GraphModule) -> Report:
        return Report()


@dataclass(frozen=True)
class Optional:
    """Pass with an option whose type cannot be inferred from its default."""

    name: ClassVar[str] = "optional"
    size: int | None = None

    def apply(self, gm: fx.GraphModule) -> Report:
        return Report()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Named, "'my pass' is not valid. Expected lower-case letters"),
        (Optional, "option size of the pass optional cannot be parsed.*default None"),
    ],
)
def test_a_pass_that_text_cannot_express_is_refused(kind: type[Pass], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        graph_pass(kind)
    assert kind.name not in PASSES
