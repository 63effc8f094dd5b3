"""Tests of `explore`: what a page has, and that it is what the compiler did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.inspect.explorer.recorded import unfolded
from tests.inspect.explorer.test_page import HOSTILE, Page, blob
from tpcompile.errors import UsageError
from tpcompile.exploring import Exploration, explore
from tpcompile.inspect.plan import plan_report
from tpcompile.passes import decode_pipeline, default_pipeline, pipeline_text
from tpcompile.presets import preset
from tpcompile.runtime.ranks.rank import rank_modules

pytestmark = pytest.mark.usefixtures("captured_once")


@pytest.fixture(scope="module")
def exploration(captured_once: None) -> Exploration:
    return explore("preset:tiny-qwen3", 2, beside=[(3, "standard{block=16}")], target="cpu")


def data_of(explored: Exploration) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(blob(Page(explored.html()), "page"))
    return data


def test_compilations(exploration: Exploration) -> None:
    first, step, beside = exploration.compilations
    assert [compilation["name"] for compilation in (first, step, beside)] == [
        "prompts, tp=2",
        "decode step, tp=2",
        "prompts, tp=3",
    ]
    assert [compilation["tp"] for compilation in (first, step, beside)] == [2, 2, 3]
    assert [compilation["recording"] for compilation in (first, step, beside)] == [0, 0, 1]
    assert first["pipeline"] == pipeline_text(default_pipeline(2))
    assert "block=16" in beside["pipeline"]


def test_stages_are_those_of_the_pipelines(exploration: Exploration) -> None:
    passes = {0: default_pipeline(2), 1: decode_pipeline(2), 2: default_pipeline(3)}
    for number, compilation in enumerate(exploration.compilations):
        stages = exploration.recordings[compilation["recording"]].stages
        names = [stages[stage]["name"] for stage in compilation["stages"]]
        assert names == ["capture", *(current.name for current in passes[number])]


def test_plans_and_modules_are_those_of_the_graphs(exploration: Exploration) -> None:
    from tests.captures import captured_once as capture
    from tpcompile.passes import run_passes

    config = AutoConfig.for_model(**preset("tiny-qwen3"))
    config.name_or_path = "preset:tiny-qwen3"
    graph, _ = run_passes(capture(config).graph, default_pipeline(2))
    first = exploration.compilations[0]
    plan = plan_report(graph).to_json()
    assert first["plan"]["ranks"] == plan["ranks"]
    assert first["plan"]["collectives"] == plan["collectives"]
    whole = [
        first["modules"][module] if isinstance(module, int) else module
        for module in first["modules"]
    ]
    assert len(whole) == 2
    for mine, theirs in zip(whole, rank_modules(graph), strict=True):
        assert mine.partition("\n")[2] == theirs.source.partition("\n")[2]


def test_sources_have_every_line_that_is_cited(exploration: Exploration) -> None:
    data = data_of(exploration)
    cited = {
        (row["origin"][1], row["origin"][2])
        for recording in data["recordings"]
        for row in recording["lines"]
        if row.get("origin", ["", "", 0])[1]
    }
    assert {file for file, _ in cited} == set(data["sources"])
    for file, line in cited:
        assert data["sources"][file].splitlines()[line - 1].strip(), (file, line)
    assert len(cited) > 10


def test_a_source_that_is_gone(exploration: Exploration, monkeypatch: pytest.MonkeyPatch) -> None:
    without_sources = Exploration("t", recordings=exploration.recordings)
    files = dict.fromkeys(exploration.recordings[0].lines.files, "/no/such/file.py")
    monkeypatch.setattr(exploration.recordings[0].lines, "files", files)
    monkeypatch.setattr(exploration.recordings[1].lines, "files", {})
    assert set(data_of(without_sources)["sources"].values()) == {""}


def test_a_page_is_deterministic(exploration: Exploration) -> None:
    assert exploration.html() == exploration.html()
    again = explore("preset:tiny-qwen3", 2, beside=[(3, "standard{block=16}")], target="cpu")
    for recording, other in zip(exploration.recordings, again.recordings, strict=True):
        assert recording.lines.rows == other.lines.rows
        assert recording.bodies == other.bodies
        for a, b in zip(recording.stages, other.stages, strict=True):
            timeless = {"ms": 0, "check_ms": 0, "proof_ms": 0}
            assert a | timeless == b | timeless


def test_a_pipeline_without_collectives_has_no_modules() -> None:
    raised = "canonicalize,raise-norm,raise-rope,raise-swiglu,raise-attention"
    early = f"{raised},plan-sharding,shard-linears"
    explored = explore("preset:tiny-qwen3", 1, beside=[(2, early), (2, raised)], target="cpu")
    sharded, unplanned = explored.compilations[2:]
    assert sharded["modules"] == [] and sharded["plan"] is not None
    assert (unplanned["plan"], unplanned["axes"]) == (None, [])
    names = [stage["name"] for stage in explored.recordings[1].stages]
    assert names == ["capture", *early.split(",")]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": "h3000"}, "h3000"),
        ({"policy": "rounds"}, "rounds"),
        ({"pipeline": "no-such-pass"}, "no-such-pass"),
        ({"beside": [(2, "no-such-pass")]}, "no-such-pass"),
        ({"beside": [(0, None)]}, "tp"),
        ({"context": 0}, "context"),
    ],
)
def test_options_are_refused_before_the_capture(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        explore("no/such/model", 2, **options)


def test_steps_are_measured_on_the_cpu_only() -> None:
    with pytest.raises(UsageError, match="target='cpu', or a file"):
        explore("preset:tiny-qwen3", 1, target="h200", measured=True)


def test_steps_are_measured_for_a_calibrated_target(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"name": "mine", "workers": 1}')
    explored = explore("preset:tiny-qwen3", 1, target=str(path), measured=True)
    assert explored.schedule is not None
    data, _ = explored.schedule
    assert data["target"]["name"] == "mine"
    assert data["measured"] and all(step["us"] > 0 for step in data["measured"])


def test_comparisons() -> None:
    messages: list[str] = []
    explored = explore(
        "preset:tiny-qwen3", 2, target="cpu", compare=True, random_weights=0, say=messages.append
    )
    fp32, bf16 = explored.comparisons
    assert (fp32["dtype"], bf16["dtype"]) == ("float32", "bfloat16")
    assert (fp32["ok"], bf16["ok"]) == (True, True)
    assert (fp32["beside_fp32"], bf16["beside_fp32"]) == (False, True)
    names = [name for _, name in unfolded(explored.recordings[0], 0, lambda row: row["name"])]
    for rows in (fp32["rows"], bf16["rows"]):
        assert len(rows) > 30
        assert all(row["error"] <= row["limit"] for row in rows if row["error"] is not None)
    assert messages[0] == "capturing preset:tiny-qwen3"
    assert [text for text in messages if "comparing" in text] == [
        "comparing with eager in float32",
        "comparing with eager in bfloat16",
    ]
    compared = [row["node"] for row in fp32["rows"] if row["node"] in names]
    assert len(compared) > 10


@pytest.mark.parametrize("name", HOSTILE)
def test_a_model_with_a_hostile_name(name: str, exploration: Exploration, tmp_path: Path) -> None:
    hostile = Exploration(
        name,
        {"model": name},
        exploration.recordings,
        exploration.compilations,
        schedule=exploration.schedule,
    )
    page = Page(hostile.html())
    assert [tag for tag, _ in page.elements] == [
        tag for tag, _ in Page(exploration.html()).elements
    ]
    path = tmp_path / "page.html"
    hostile.write(path)
    assert data_of(hostile)["title"] == name


def test_dtype() -> None:
    explored = explore("preset:tiny-qwen3", 1, dtype=torch.bfloat16, target="cpu")
    assert explored.about["dtype"] == "bfloat16"
