"""The mutant harness meets the benchmark's targets on a small seeded set, and can fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch

from benchmarks import mutants
from benchmarks.mutants import Result, refused_pairs, results, shortfalls
from benchmarks.mutations import KINDS, SUBJECTS, Graph, graphs, judge
from tpcompile.ir import check_parameters, checker, meta
from tpcompile.ir.format import Component
from tpcompile.ir.ops import LINEAR, SPECS, VOCAB_EMBEDDING
from tpcompile.ir.recipe import Recipe, Slice, component_of, take
from tpcompile.ir.types import PARTIAL, REPLICATE, ValueType
from tpcompile.rewriting.manager import clone

attention = import_module("tpcompile.ir.ops.decode.attention")
cache = import_module("tpcompile.ir.ops.cache")
delta = import_module("tpcompile.ir.ops.delta")

_PER_KIND = 2


@pytest.fixture(scope="module")
def some_graphs() -> list[Graph]:
    """Return all subjects in all pipelines, at one tp that splits their heads unevenly."""
    return list(graphs(replace(subject, tps=subject.tps[1:2]) for subject in SUBJECTS))


@pytest.fixture(scope="module")
def mutant_results(some_graphs: list[Graph]) -> list[Result]:
    return list(results(_PER_KIND, seed=1, on=some_graphs))


def test_right_graphs_are_not_refused(some_graphs: list[Graph]) -> None:
    for graph in some_graphs:
        verdict = judge(clone(graph.gm), graph)
        assert (verdict.checker, verdict.numbers, verdict.crash) == ("", "", ""), graph.name


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_each_kind_is_noticed(kind: Any, mutant_results: list[Result]) -> None:
    mine = [result for result in mutant_results if result.kind is kind]
    assert mine, "no graph fits this kind"
    for result in mine:
        assert not result.survived, result.name
        assert not result.verdict.crash, result.name
        assert not result.unexplained, f"no effect: {result.name}"
        assert not (kind.strict and result.by_numbers_only), f"accepted: {result.name}"


def test_the_targets_are_met(mutant_results: list[Result]) -> None:
    assert shortfalls(mutant_results) == []


def test_the_same_seed_gives_the_same_mutants(some_graphs: list[Graph]) -> None:
    few = [kind for kind in KINDS if kind.name in ("swapped slices", "uneven split with a gap")]
    runs = [[r.name for r in results(3, 7, some_graphs, few)] for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0] != [r.name for r in results(3, 8, some_graphs, few)]


def _rates(kinds: Sequence[str], some_graphs: list[Graph]) -> tuple[int, int, int]:
    """Return how many mutants of some kinds exist, fail the checker, or change only the numbers."""
    chosen = [kind for kind in KINDS if kind.name in kinds]
    assert len(chosen) == len(kinds)
    judged = list(results(_PER_KIND, 1, some_graphs, chosen))
    return len(judged), sum(r.by_checker for r in judged), sum(r.by_numbers_only for r in judged)


def test_without_the_recipe_check_only_numbers_see_wrong_slices(
    monkeypatch: pytest.MonkeyPatch, some_graphs: list[Graph]
) -> None:
    monkeypatch.setattr(checker, "check_parameter", lambda parameter, ranks: None)
    kinds = ("swapped slices", "shifted slices", "slice of another layer")
    total, by_checker, by_numbers = _rates(kinds, some_graphs)
    assert (by_checker, by_numbers) == (0, total)


HOLES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "rows": (
        {"check_whole": lambda parameter: None, "unread_rows": lambda graph: iter(())},
        ("rows repeated", "rows skipped", "rows permuted"),
    ),
    "biases": (
        {"wrong_biases": lambda graph, info: iter(())},
        ("bias of another layer", "bias of another projection", "bias behind another sum"),
    ),
    "layers": (
        {"shared_layers": lambda graph: iter(())},
        ("spans of another partial", "states of another layer", "numbers of states"),
    ),
}


@pytest.mark.parametrize("name", HOLES)
def test_without_a_check_only_numbers_see_its_mistakes(
    name: str, monkeypatch: pytest.MonkeyPatch, some_graphs: list[Graph]
) -> None:
    holes, kinds = HOLES[name]
    assert _rates(kinds, some_graphs)[2] == 0
    for function, lenient in holes.items():
        monkeypatch.setattr(checker, function, lenient)
    total, by_checker, by_numbers = _rates(kinds, some_graphs)
    assert by_numbers > 0 and by_checker + by_numbers == total


CACHE_RULES = {
    "check_blocks": ("blocks of one reader", "blocks of one layer"),
    "_check_queries": ("queries of another layer",),
    "_check_one_partial": ("lse of another partial", "values of another partial"),
}


@pytest.mark.parametrize("rule", CACHE_RULES)
def test_without_a_rule_of_the_cache_only_numbers_see_its_mistakes(
    rule: str, monkeypatch: pytest.MonkeyPatch, some_graphs: list[Graph]
) -> None:
    """Removing a rule on the cache leaves its mistakes to be detected by the numbers alone."""
    for module in (attention, cache):
        if hasattr(module, rule):
            monkeypatch.setattr(module, rule, lambda *_: None)
    monkeypatch.setattr(checker, "shared_layers", lambda graph: iter(()))
    if rule == "check_blocks":
        monkeypatch.setattr(attention, "_check_queries", lambda *_: None)
    total, by_checker, by_numbers = _rates(CACHE_RULES[rule], some_graphs)
    assert by_numbers > 0 and by_checker + by_numbers == total


def test_without_the_rule_for_key_heads_only_numbers_see_wrong_ones(
    monkeypatch: pytest.MonkeyPatch, some_graphs: list[Graph]
) -> None:
    monkeypatch.setattr(delta, "check_groups", lambda *_: None)
    total, by_checker, by_numbers = _rates(("wrong key head",), some_graphs)
    assert by_numbers > 0 and by_checker + by_numbers == total


def test_without_the_rule_for_tied_weights_a_second_one_survives(
    monkeypatch: pytest.MonkeyPatch, some_graphs: list[Graph]
) -> None:
    monkeypatch.setattr(checker, "shared_tensors", lambda graph: iter(()))
    (kind,) = (kind for kind in KINDS if kind.name == "tied weight split twice")
    judged = list(results(4, 1, some_graphs, [kind]))
    assert any(result.survived for result in judged)
    assert any("nothing notices" in line for line in shortfalls(judged))


def test_without_the_rule_for_embeddings_the_offset_survives(
    monkeypatch: pytest.MonkeyPatch, some_graphs: list[Graph]
) -> None:
    def lenient(weight: ValueType, ids: ValueType, first_row: int = 0) -> Any:
        return spec.rule(weight, ids)

    spec = SPECS[VOCAB_EMBEDDING]
    monkeypatch.setitem(SPECS, VOCAB_EMBEDDING, replace(spec, rule=lenient))
    total, by_checker, by_numbers = _rates(("vocabulary offset given",), some_graphs)
    assert total and (by_checker, by_numbers) == (0, 0)


def test_a_rule_that_accepts_everything_lets_the_rate_fall(
    monkeypatch: pytest.MonkeyPatch, some_graphs: list[Graph]
) -> None:
    kinds = ("layouts differ between q and o", "uneven split with an overlap")
    before = _rates(kinds, some_graphs)
    assert before[1] == before[0]

    def accepting(input: ValueType, weight: ValueType, bias: ValueType | None = None) -> Any:
        try:
            return spec.rule(input, weight, bias)
        except checker.RuleError:
            kind = ValueType((*input.shape[:-1], weight.shape[0]), input.dtype)
            return kind.placed(REPLICATE if weight.layout_of(1) is None else PARTIAL)

    spec = SPECS[LINEAR]
    monkeypatch.setitem(SPECS, LINEAR, replace(spec, rule=accepting))
    total, by_checker, by_numbers = _rates(kinds, some_graphs)
    assert by_checker < before[1] and by_checker + by_numbers == total


def _of_first_rows(recipe: Recipe, part: Component) -> Recipe:
    """Take the first rows of scales, not those of the weight's part."""
    match recipe:
        case Slice(source, 0, start, stop) if part.suffix:
            return take(component_of(source, part), 0, 0, stop - start)
    return component_of(recipe, part)


def _of_first_columns(recipe: Recipe, part: Component) -> Recipe:
    """Take the first scales of rows."""
    right = component_of(recipe, part)
    match right:
        case Slice(source, 1, start, stop) if part.suffix:
            return Slice(source, 1, 0, stop - start)
    return right


def _of_group_before(recipe: Recipe, part: Component) -> Recipe:
    """Take the scales of the columns before those of the weight's part."""
    right = component_of(recipe, part)
    match right:
        case Slice(source, 1, start, stop) if part.suffix and start:
            return Slice(source, 1, start - 1, stop - 1)
    return right


def _without_cut_group(recipe: Recipe, part: Component) -> Recipe:
    """Leave out the scale of a group that the next rank has a part of."""
    match recipe:
        case Slice(source, 1, start, stop) if part.suffix and part.columns:
            whole = component_of(source, part)
            return take(whole, 1, start // part.columns, stop // part.columns)
    return component_of(recipe, part)


def _along_rows(recipe: Recipe, part: Component) -> Recipe:
    """Cut the rows of scales instead of their columns."""
    right = component_of(recipe, part)
    match right:
        case Slice(source, 1, start, stop) if part.suffix:
            return Slice(source, 0, start, stop)
    return right


WRONG_COMPONENTS = (
    _of_first_rows,
    _of_first_columns,
    _of_group_before,
    _without_cut_group,
    _along_rows,
)


@pytest.mark.parametrize("wrong", WRONG_COMPONENTS, ids=lambda wrong: wrong.__name__)
def test_components_of_another_part_are_refused(
    wrong: Any, monkeypatch: pytest.MonkeyPatch, some_graphs: list[Graph]
) -> None:
    """Only numbers see them if the check is left out."""
    few_bits = [
        graph
        for graph in some_graphs
        if graph.subject.name.startswith("int") and graph.pipeline in ("fused", "unfused")
    ]
    for graph in few_bits:
        assert judge(clone(graph.gm), graph).numbers == ""
    monkeypatch.setattr(meta, "component_of", wrong)
    verdicts = [judge(clone(graph.gm), graph) for graph in few_bits]
    assert all(verdict.checker == "components" for verdict in verdicts if verdict.numbers)
    assert any(verdict.numbers for verdict in verdicts)
    monkeypatch.setattr(check_parameters, "check_components", lambda parameter, rank: None)
    accepted = [judge(clone(graph.gm), graph) for graph in few_bits]
    assert [bool(verdict.numbers) for verdict in accepted] == [
        bool(verdict.numbers) for verdict in verdicts
    ]
    assert not any(verdict.checker for verdict in accepted)


@pytest.mark.parametrize(
    "tps", [(2, 5), pytest.param(mutants.GOOD_TPS, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_a_good_model_of_full_size_is_not_refused(
    tps: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "GOOD_TPS", tps)
    threads = torch.get_num_threads()
    try:
        assert refused_pairs("qwen2.5-0.5b") == []
    finally:
        torch.set_num_threads(threads)
