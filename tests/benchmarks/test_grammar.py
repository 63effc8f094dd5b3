"""The benchmark of structured output: it measures all parts, and a missed limit is a failure."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer

import tpcompile
from benchmarks import grammar
from benchmarks.grammars import vocabulary
from benchmarks.grammars.answers import answer_schemas, is_instance
from benchmarks.grammars.libraries import SIDES, timed
from benchmarks.grammars.records import record
from benchmarks.grammars.steps import KINDS, measure_steps
from tests.runtime.eager_pair import lively
from tests.serving.tokens import SIZE, byte_tokenizer
from tpcompile.demo.model import make_demo

LIBRARY = {
    "bytes": 10_033,
    "first_ms": 60.0,
    "later_ms": 5.0,
    "mask_mean_ms": 0.02,
    "mask_p99_ms": 0.1,
    "mask_max_ms": 1.7,
}
STEPS = {
    "model": "x",
    "threads": 2,
    "batch": 1,
    "token_ms": 30,
    "logits_ms": 31,
    "structure_ms": 32,
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (vocabulary, grammar):
        monkeypatch.setattr(module, "TOKENS", 3000)
    monkeypatch.setattr(vocabulary, "_READ", 100_000)
    return


def test_the_tokenizer_has_so_many_tokens(small: None, tmp_path: Path) -> None:
    tokenizer = vocabulary.tokenizer_in(tmp_path)
    assert len(tokenizer) == len(set(tokenizer.get_vocab())) == 3000
    text = 'def f(x): return {"ä": x}'
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize("size", [300, 3000])
def test_a_record_is_an_instance(size: int) -> None:
    schema, instance = record(size)
    assert size <= len(schema) < size + 200
    assert is_instance(json.loads(schema), instance)
    assert not is_instance(json.loads(schema), instance[:-1])
    assert not is_instance(json.loads(schema), "{}")


def test_main(small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--directory", str(tmp_path), "--sizes", "400", "--turns", "2", "--tokens", "0"]
    status = grammar.main([*options, "--libraries", "llguidance", "--json"])
    measured = json.loads(capsys.readouterr().out)
    assert status == (not measured["ok"])
    (sizes,) = measured["libraries"].values()
    assert [case["bytes"] for case in sizes] == [len(record(400)[0])]
    assert 0 < sizes[0]["mask_mean_ms"] <= sizes[0]["mask_max_ms"]


def test_schemas_need_a_model() -> None:
    with pytest.raises(SystemExit):
        grammar.main(["--schemas", "3"])


@pytest.mark.parametrize("name", SIDES)
def test_sides(name: str) -> None:
    pytest.importorskip(name)
    result = timed(SIDES[name](byte_tokenizer(), SIZE), byte_tokenizer(), 300, 2)
    assert len(result.compile_ms) == 2 and all(ms > 0 for ms in result.mask_ms)


def test_steps() -> None:
    with tpcompile.compile(lively("tiny-qwen3"), max_seq_len=64) as model:
        steps = measure_steps(model, byte_tokenizer(), batch=2, tokens=6, turns=1)
    assert {len(steps.ms[kind]) for kind in KINDS} == {5}


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"later_ms": 50.1}, ["compiles"]),
        ({"share": 0.031}, ["a mask takes"]),
        ({"stop": 89, "length": 11}, ["of the answers finish"]),
        ({"invalid": 1}, ["are valid"]),
    ],
)
def test_a_missed_limit_is_a_failure(changes: dict[str, Any], missed: list[str]) -> None:
    def changed(values: dict[str, Any]) -> dict[str, Any]:
        return values | {key: value for key, value in changes.items() if key in values}

    measured = {
        "libraries": {"llguidance": [changed(LIBRARY)]},
        "steps": changed({**STEPS, "share": 0.03}),
        "answers": changed({"stop": 95, "length": 5, "invalid": 0, "refused": 3}),
    }
    shown = io.StringIO()
    grammar.show(measured, Console(file=shown, width=110))
    lines = [line for line in shown.getvalue().splitlines() if line.endswith("MISSED")]
    assert len(lines) == len(missed)
    assert all(text in line for text, line in zip(missed, lines, strict=True))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo")
    make_demo(directory, 3, 300)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_two_thousand_random_schemas(demo: Path, seed: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo)
    with tpcompile.compile(str(demo)) as model:
        ends = answer_schemas(model, tokenizer, 250, seed, min(512, model.max_seq_len - 1))
    assert set(ends) <= {"stop", "length"}
    assert ends["stop"] >= 225, ends
