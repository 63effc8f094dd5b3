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
def found(captured_once: None) -> Exploration:
    return explore("preset:tiny-qwen3", 2, beside=[(3, "standard{block=16}")], target="cpu")


def data_of(one: Exploration) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(blob(Page(one.html()), "page"))
    return data


def test_compilations(found: Exploration) -> None:
    first, step, beside = found.compilations
    assert [one["name"] for one in (first, step, beside)] == [
        "prompts, tp=2",
        "decode step, tp=2",
        "prompts, tp=3",
    ]
    assert [one["tp"] for one in (first, step, beside)] == [2, 2, 3]
    assert [one["recording"] for one in (first, step, beside)] == [0, 0, 1]
    assert first["pipeline"] == pipeline_text(default_pipeline(2))
    assert "block=16" in beside["pipeline"]


def test_stages_are_those_of_the_pipelines(found: Exploration) -> None:
    passes = {0: default_pipeline(2), 1: decode_pipeline(2), 2: default_pipeline(3)}
    for number, one in enumerate(found.compilations):
        stages = found.recordings[one["recording"]].stages
        names = [stages[stage]["name"] for stage in one["stages"]]
        assert names == ["capture", *(current.name for current in passes[number])]


def test_plans_and_modules_are_those_of_the_graphs(found: Exploration) -> None:
    from tests.captures import captured_once as capture
    from tpcompile.passes import run_passes

    config = AutoConfig.for_model(**preset("tiny-qwen3"))
    config.name_or_path = "preset:tiny-qwen3"
    graph, _ = run_passes(capture(config).graph, default_pipeline(2))
    first = found.compilations[0]
    plan = plan_report(graph).to_json()
    assert first["plan"]["ranks"] == plan["ranks"]
    assert first["plan"]["collectives"] == plan["collectives"]
    whole = [first["modules"][one] if isinstance(one, int) else one for one in first["modules"]]
    assert len(whole) == 2
    for mine, theirs in zip(whole, rank_modules(graph), strict=True):
        assert mine.partition("\n")[2] == theirs.source.partition("\n")[2]


def test_sources_have_every_line_that_is_cited(found: Exploration) -> None:
    data = data_of(found)
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


def test_a_source_that_is_gone(found: Exploration, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Exploration("t", recordings=found.recordings)
    files = dict.fromkeys(found.recordings[0].lines.files, "/no/such/file.py")
    monkeypatch.setattr(found.recordings[0].lines, "files", files)
    monkeypatch.setattr(found.recordings[1].lines, "files", {})
    assert set(data_of(one)["sources"].values()) == {""}


def test_a_page_is_deterministic(found: Exploration) -> None:
    assert found.html() == found.html()
    again = explore("preset:tiny-qwen3", 2, beside=[(3, "standard{block=16}")], target="cpu")
    for one, other in zip(found.recordings, again.recordings, strict=True):
        assert one.lines.rows == other.lines.rows
        assert one.bodies == other.bodies
        for a, b in zip(one.stages, other.stages, strict=True):
            timeless = {"ms": 0, "check_ms": 0, "proof_ms": 0}
            assert a | timeless == b | timeless


def test_a_pipeline_without_collectives_has_no_modules() -> None:
    raised = "canonicalize,raise-norm,raise-rope,raise-swiglu,raise-attention"
    early = f"{raised},plan-sharding,shard-linears"
    one = explore("preset:tiny-qwen3", 1, beside=[(2, early), (2, raised)], target="cpu")
    sharded, unplanned = one.compilations[2:]
    assert sharded["modules"] == [] and sharded["plan"] is not None
    assert (unplanned["plan"], unplanned["axes"]) == (None, [])
    names = [stage["name"] for stage in one.recordings[1].stages]
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
    found = explore("preset:tiny-qwen3", 1, target=str(path), measured=True)
    assert found.schedule is not None
    data, _ = found.schedule
    assert data["target"]["name"] == "mine"
    assert data["measured"] and all(step["us"] > 0 for step in data["measured"])


def test_comparisons() -> None:
    said: list[str] = []
    one = explore(
        "preset:tiny-qwen3", 2, target="cpu", compare=True, random_weights=0, say=said.append
    )
    fp32, bf16 = one.comparisons
    assert (fp32["dtype"], bf16["dtype"]) == ("float32", "bfloat16")
    assert (fp32["ok"], bf16["ok"]) == (True, True)
    assert (fp32["beside_fp32"], bf16["beside_fp32"]) == (False, True)
    names = [name for _, name in unfolded(one.recordings[0], 0, lambda row: row["name"])]
    for rows in (fp32["rows"], bf16["rows"]):
        assert len(rows) > 30
        assert all(row["error"] <= row["limit"] for row in rows if row["error"] is not None)
    assert said[0] == "capturing preset:tiny-qwen3"
    assert [text for text in said if "comparing" in text] == [
        "comparing with eager in float32",
        "comparing with eager in bfloat16",
    ]
    compared = [row["node"] for row in fp32["rows"] if row["node"] in names]
    assert len(compared) > 10


@pytest.mark.parametrize("name", HOSTILE)
def test_a_model_with_a_hostile_name(name: str, found: Exploration, tmp_path: Path) -> None:
    one = Exploration(
        name, {"model": name}, found.recordings, found.compilations, schedule=found.schedule
    )
    page = Page(one.html())
    assert [tag for tag, _ in page.elements] == [tag for tag, _ in Page(found.html()).elements]
    path = tmp_path / "page.html"
    one.write(path)
    assert data_of(one)["title"] == name


def test_dtype() -> None:
    one = explore("preset:tiny-qwen3", 1, dtype=torch.bfloat16, target="cpu")
    assert one.about["dtype"] == "bfloat16"
