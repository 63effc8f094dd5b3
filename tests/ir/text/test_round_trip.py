"""Text is parsed to the same graph: it has the same text, and computes the same numbers."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import fx

from benchmarks.mutations import KINDS, SUBJECTS, Graph, Kind, graphs, mutants_of
from tests.captures import captured_once
from tests.ir.text.damage import Damage
from tests.ir.text.stages import TINY, visit_stages
from tests.models import batch, preset_pair
from tests.passes.steps import TINY_VOCABULARY
from tpcompile.errors import CompileError, UsageError
from tpcompile.frontend import parse_graph
from tpcompile.ir.checker import check_graph
from tpcompile.ir.meta import origin_of
from tpcompile.ir.ops import DECODE_OPS
from tpcompile.ir.parse import text_problems
from tpcompile.ir.simulate import logits_of, materialise, run_ranks
from tpcompile.ir.text import format_graph, read_graph
from tpcompile.passes import default_pipeline, for_ranks, parse_pipeline, run_passes
from tpcompile.presets import PRESETS
from tpcompile.rewriting.manager import clone

OFFICIAL = [name for name in PRESETS if name not in TINY]


@pytest.mark.parametrize("tps", [(1, 3), pytest.param((2, 4), marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", TINY)
def test_every_stage_of_a_tiny_model(model: str, tps: tuple[int, ...]) -> None:
    """The text of each stage gives a valid graph, with the same text and the same numbers."""
    pair = preset_pair(model)
    steps = {
        one_token: batch((1, 1) if one_token else (3, 1), TINY_VOCABULARY).inputs()
        for one_token in (0, 1)
    }

    def numbers(gm: fx.GraphModule, one_token: bool) -> list[torch.Tensor]:
        weights = materialise(gm, pair.read)
        tables = pair.captured.rotary.fresh()
        with torch.inference_mode():
            return logits_of(run_ranks(gm, steps[one_token], weights, tables))

    def look(text: str, gm: fx.GraphModule) -> None:
        parsed = parse_graph(text)
        assert format_graph(parsed) == text
        one_token = any(node.target in DECODE_OPS for node in gm.graph.nodes)
        actual, expected = numbers(parsed, one_token), numbers(gm, one_token)
        assert all(map(torch.equal, actual, expected))
        assert len(actual) == len(expected)

    assert visit_stages(pair.captured.graph, tps, look) > 50


def _assert_same(text: str, gm: fx.GraphModule) -> None:
    assert format_graph(parse_graph(text)) == text


@pytest.mark.parametrize(
    ("model", "pipeline"),
    [("qwen2.5-0.5b", "decode{interleaved=True,spans=2}"), ("qwen3-0.6b", "standard")],
)
def test_the_last_stage_of_an_official_model(model: str, pipeline: str) -> None:
    captured = captured_once(f"preset:{model}").graph
    gm, _ = run_passes(captured, for_ranks(parse_pipeline(pipeline), 3))
    _assert_same(format_graph(gm), gm)


@pytest.mark.slow
@pytest.mark.parametrize("model", OFFICIAL)
def test_every_stage_of_an_official_model(model: str) -> None:
    """Parsing checks each graph too: it is as valid as the one that was printed."""
    graph = captured_once(f"preset:{model}").graph
    assert visit_stages(graph, (1, 2, 3, 4), _assert_same) > 100


@pytest.fixture(scope="module")
def on_two_ranks() -> fx.GraphModule:
    return run_passes(captured_once("preset:tiny-qwen3").graph, default_pipeline(2))[0]


@pytest.mark.parametrize(
    "module",
    ['layers.0["a"]', "two words", "line\nbreak\r\x00\u2028", "# not a comment", "<script>", "a:7"],
)
@pytest.mark.parametrize("file", ["", "modeling.py", "my model.py", 'a".py', "new\nline.py"])
def test_hostile_origins(module: str, file: str, on_two_ranks: fx.GraphModule) -> None:
    gm = clone(on_two_ranks)
    for node in gm.graph.nodes:
        if node.op == "call_function":
            node.meta["origin"] = replace(origin_of(node), module=module, file=file, line=3)
    _assert_same(format_graph(gm), gm)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Return the texts of all stages of the tiny models on one and on three ranks."""
    stage_texts: list[str] = []
    for model in TINY:
        graph = captured_once(f"preset:{model}").graph
        visit_stages(graph, (1, 3), lambda text, gm: stage_texts.append(text))
    return stage_texts


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_damaged_text_is_refused_with_its_line(texts: list[str], count: int) -> None:
    """A changed line is refused, or gives another graph, whose text is consistent."""
    damage = Damage(texts, seed=count)
    refused = 0
    for _ in range(count):
        text = damage.text()
        parsed = _parsed(text)
        if isinstance(parsed, CompileError):
            assert re.search(r"^line [1-9]", parsed.where), f"{parsed}\n{text}"
            refused += 1
        else:
            _assert_same(format_graph(parsed), parsed)
    assert refused > count / 2


def _parsed(text: str) -> fx.GraphModule | CompileError:
    try:
        return parse_graph(text)
    except CompileError as error:
        return error


@pytest.mark.parametrize("text", ["", "\n", "# only a comment\n", " ", "\0", "\ufeff", "graph"])
def test_text_without_a_graph_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"text of a graph|name of the graph|line is not valid"):
        parse_graph(text)


def test_text_that_ends_early_is_refused(texts: list[str]) -> None:
    """Every beginning of a text is refused, except one that lacks the last line break only."""
    text = min(texts, key=len)
    lines = text.splitlines(keepends=True)
    for count in range(1, len(lines)):
        with pytest.raises(CompileError, match=r"At line \d+"):
            parse_graph("".join(lines[:count]))
    _assert_same(text, parse_graph(text.rstrip("\n")))


def test_other_line_ends_and_comments_are_accepted(texts: list[str]) -> None:
    for changed in (texts[-1].replace("\n", "\r\n"), "# a\n\n" + texts[-1] + "\n  # b\n"):
        assert format_graph(parse_graph(changed)) == texts[-1]


@pytest.fixture(scope="module")
def mutated() -> list[Graph]:
    """Return the graphs of one subject in all pipelines, at an uneven tp."""
    return list(graphs([replace(SUBJECTS[0], tps=SUBJECTS[0].tps[1:2])]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_mistake_is_found_in_text_too(kind: Kind, mutated: list[Graph]) -> None:
    """The checker's answer to the text of a graph is its answer to the graph.

    Except one: the text does not say from which tensors a parameter was captured, so the checker
    cannot refuse a recipe of other tensors for that.
    """
    for mutant in mutants_of(kind, mutated, count=2, seed=0):
        problems = {(p.node, p.rule) for p in check_graph(mutant.gm)}
        try:
            read = read_graph(format_graph(mutant.gm))
        except UsageError:
            assert problems, mutant.name
            continue
        reported = {(p.node, p.rule) for p in text_problems(read)}
        assert {p for p in problems if p[1] != "recipe"} <= reported, mutant.name
        assert problems or not reported, mutant.name
