"""The decode benchmark runs all sides in turn on the same tokens, and reports each failure."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks.checkpoint import RandomCheckpoint, write_checkpoint
from benchmarks.decode import Group, groups, main
from benchmarks.decode_measured import (
    EAGER,
    LLAMA,
    NATIVE,
    ONE,
    OPENVINO,
    TWO,
    Case,
    Loaded,
    Measured,
    Weights,
)
from benchmarks.decode_subjects import Subject
from benchmarks.peers.kinds import Sizes
from benchmarks.peers.side import NotInstalledError, Side, SideError, SideSpec
from tests.gguf_files import model_of, write_gguf

pytestmark = pytest.mark.usefixtures("forked_sides")
SUBJECT = Subject("fp32", Path("nowhere"), 2, 1013, torch.float32, 1000, Weights(250, 1000))
CASE = Case("fp32", 1, 64)
QUIET = Console(quiet=True)


class _Fake:
    """Fake side that logs its calls and returns given logits."""

    def __init__(self, spec: SideSpec, log: list[Any], logits: list[float]) -> None:
        self.spec, self._log, self._logits = spec, log, logits
        self.tokens: list[list[int]] = []
        self.lengths: list[int] = []

    def ask(self, request: str, rows: list[list[int]], *lengths: int) -> tuple[list[float], Any]:
        self._log.append((self.spec.name, request, len(rows), len(rows[0])))
        self.tokens += rows
        self.lengths += lengths
        count = 1 if request == "prefill" else len(rows[0])
        logits = np.array([self._logits] * len(rows), dtype=np.float32)
        return [99.0] + [1.0] * (count - 1), logits

    def close(self) -> None:
        self._log.append((self.spec.name, "close"))


class _Failing(_Fake):
    def ask(self, request: str, rows: list[list[int]], *lengths: int) -> tuple[list[float], Any]:
        raise SideError("it fell")


def _group(**logits: list[float]) -> tuple[Group, dict[str, Any], list[Any]]:
    log: list[Any] = []
    names = {"eager": EAGER, "one": ONE, "two": TWO}
    specs = {n: SideSpec(names[n], "eager", 1, 1, prompts=n != "two") for n in names}
    specs["two"] = SideSpec(TWO, "eager", 2, 1, most_sequences=2, prompts=False)
    fakes: dict[str, Any] = {names[n]: _Fake(specs[n], log, values) for n, values in logits.items()}
    group = Group(SUBJECT, Measured("qwen3-0.6b"))
    group._sides.update(fakes)
    group._measured.loaded["fp32"] = {name: Loaded("", Sizes(1, 1000, 10)) for name in fakes}
    return group, fakes, log


def test_sides_take_turns_on_the_same_tokens() -> None:
    group, fakes, log = _group(eager=[1, 2], one=[1, 2])
    group.decode(64, 3, 10, QUIET)
    assert log == [(n, r, 3, c) for r, c in [("prefill", 64), ("decode", 6), ("decode", 6)]
                   for n in (EAGER, ONE)]  # fmt: skip
    assert fakes[EAGER].tokens == fakes[ONE].tokens
    assert len({token for row in fakes[ONE].tokens for token in row}) > 150
    assert fakes[ONE].lengths == [64 + 12]
    # the first step of a turn, which took 99 s, is not counted
    (turns,) = group._measured.turns
    assert turns.seconds == {name: [1.0] * 10 for name in (EAGER, ONE)}
    assert turns.case == Case("fp32", 3, 64)
    assert group._measured.step_bytes(turns.case, ONE) == 1000 + 3 * 64 * 10
    assert [list(map(len, blocks)) for blocks in turns.bandwidths.values()] == [[2, 2]] * 2


def test_prefill_does_not_count_the_first() -> None:
    group, _, log = _group(eager=[1, 2], one=[1, 2], two=[1, 2])
    group.prefill(512, 3, QUIET)
    assert [name for name, *_ in log] == [EAGER, ONE] * 4
    assert [len(seconds) for seconds in group._measured.turns[0].seconds.values()] == [3, 3]


def test_a_batch_that_a_side_does_not_support_is_named() -> None:
    group, _, log = _group(eager=[1, 2], two=[1, 2])
    group.decode(8, 3, 5, QUIET)
    assert {name for name, *_ in log} == {EAGER}
    assert group._measured.not_supported == {TWO: "it supports batches of up to 2"}
    group.decode(8, 2, 5, QUIET)
    assert {name for name, *_ in log} == {EAGER, TWO}


def test_a_side_that_fails_is_closed_and_not_asked_again() -> None:
    group, fakes, log = _group(eager=[1, 2])
    group._sides[ONE] = _Failing(fakes[EAGER].spec, log, [])  # type: ignore[assignment]
    group.decode(8, 1, 5, QUIET)
    assert group._measured.missing == {"fp32": {ONE: "it fell"}} and (EAGER, "close") in log
    assert list(group._measured.turns[0].seconds) == [EAGER]


@pytest.mark.parametrize(
    ("logits", "ok"), [([1.0, 2.0], True), ([1.0, 2.1], False), ([1.0, float("nan")], False)]
)
def test_sides_must_agree(logits: list[float], ok: bool) -> None:
    group, _, _ = _group(eager=[1, 2], two=logits)
    group.decode(8, 2, 5, QUIET)
    assert [(a.side, a.ok) for a in group._measured.agreements] == [(TWO, ok)] * 2


@pytest.mark.parametrize(
    ("logits", "few", "ok"),
    [
        ([1.0, 2.0], "int8", [True, True]),
        ([1.0, 2.05], "int8", [True, False]),  # the integers explain it, but not the backend
        ([1.0, 2.1], "int8", [False, False]),
        ([1.0, 2.1], "int4:64", [True, False]),
        ([1.0, 2.5], "int4:64", [False, False]),
    ],
)
def test_sides_in_few_bits(logits: list[float], few: str, ok: list[bool]) -> None:
    """They agree with eager but for their integers, and with each other but for rounding."""
    group, fakes, _ = _group(eager=[1, 2], one=[1, 2], two=logits)
    for name in (ONE, TWO):
        fakes[name].spec = replace(fakes[name].spec, weights=few)
    group.decode(8, 2, 5, QUIET)
    agreements = [(a.reference, a.ok) for a in group._measured.agreements if a.side == TWO]
    assert agreements == list(zip((EAGER, ONE), ok, strict=True)) * 2


@pytest.mark.parametrize(
    ("side", "error", "ok"),
    [
        (NATIVE, 0.02, True),  # the reference rounds what meets integers to 8 bits
        (NATIVE, 0.1, False),
        (OPENVINO, 0.1, True),  # it rounds the weights again
        (OPENVINO, 0.5, False),
    ],
)
def test_sides_on_a_file_of_integers(side: str, error: float, ok: bool) -> None:
    log: list[Any] = []
    subject = replace(SUBJECT, name="q8_0.gguf", integers="int8")
    group = Group(subject, Measured("GGUF files", reference=LLAMA))
    for name, logits in ((LLAMA, [1.0, 2.0]), (side, [1.0, 2.0 + 2 * error])):
        fake: Any = _Fake(SideSpec(name, "eager", 1, 1), log, logits)
        group._sides[name] = fake
    group.decode(8, 1, 5, QUIET)
    assert [(a.side, a.reference, a.ok) for a in group._measured.agreements] == [
        (side, LLAMA, ok)
    ] * 2


def test_groups() -> None:
    sides = [SideSpec(name, "eager", 1, 1) for name in (ONE, EAGER, TWO, NATIVE)]
    tp1, eager, tp2, native = sides
    assert groups(sides, None, EAGER) == groups(sides, 4, EAGER) == [sides]
    assert groups(sides, 3, EAGER) == [[eager, tp1, tp2], [eager, native]]
    assert groups(sides, 3, NATIVE) == [[native, tp1, eager], [native, tp2]]
    assert groups([tp1, tp2], 1, EAGER) == [[tp1], [tp2]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> RandomCheckpoint:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), "tiny-qwen3")


@pytest.mark.parametrize(
    ("kind", "directory", "why"),
    [("unknown", "", "KeyError: 'unknown'"), ("eager", "nothing-here", "nothing-here")],
)
def test_a_side_that_cannot_start_is_missing(
    tmp_path: Path, kind: str, directory: str, why: str
) -> None:
    group = Group(replace(SUBJECT, path=tmp_path / directory), Measured("qwen3-0.6b"))
    with ExitStack() as stack:
        group.start([SideSpec("side", kind, 1, 1)], 1, stack, QUIET)
    assert why in group._measured.missing["fp32"]["side"]
    assert not group._measured.ok


@pytest.mark.parametrize("already", [False, True])
def test_a_side_that_dies_is_an_error(tiny: RandomCheckpoint, already: bool) -> None:
    with Side(SideSpec("side", "eager", 1, 1), tiny.directory) as side:
        assert side.ready() == [side.pid]
        side._process.kill()
        if already:  # otherwise it may die before or after the request is sent
            side._process.wait()
        with pytest.raises(SideError, match="side was killed, probably because memory ran out"):
            side.ask("prefill", [[1]], 2)


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter without any package."""
    directory = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    return directory / "bin" / "python"


@pytest.mark.parametrize("kind", ["llama.cpp", "openvino"])
def test_a_peer_that_is_not_installed_says_what_to_do(bare_python: Path, kind: str) -> None:
    spec = SideSpec("peer", kind, 1, 1, str(bare_python))
    with Side(spec, Path("nowhere")) as side, pytest.raises(NotInstalledError) as caught:
        side.ready()
    assert "No module named" in str(caught.value) and "pip install" in str(caught.value)
    assert f"--peer-python {kind}=PYTHON" in str(caught.value)


def test_end_to_end(bare_python: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "tiny-qwen3", "--contexts", "9", "--batches", "1", "3", "--steps", "5"]
    options += ["--prefills", "1", "--dtypes", "fp32", "--threads", "1", "--json"]
    options += ["--sides", "eager", "tp=1", "llama", "--peer-python", f"llama.cpp={bare_python}"]
    options += ["--weights", "int8:row", "--prompts", "12", "--directory", str(tmp_path)]
    assert main(options) == 0
    text = capsys.readouterr().out
    report = json.loads(text)
    assert report["ok"] and not report["missing"] and report["targets"] == []
    assert list(report["not_installed"]) == [LLAMA, f"{LLAMA} Q8_0"]
    steps = [{name: len(times) for name, times in t["seconds"].items()} for t in report["turns"]]
    sides = [EAGER, ONE, NATIVE, f"{ONE} int8:row", f"{NATIVE} int8:row"]
    assert steps == [dict.fromkeys(sides, count) for count in (5, 5, 1)]
    assert len(report["agreements"]) == 5 * 5
    decoded = [row for row in report["figures"] if not row["prompt"]]
    assert all(row["share_of_read"] > 0 for row in decoded)
    assert [row["side"] for row in decoded if row["share_of_limit"]] == [NATIVE, sides[-1]] * 2
    assert {row["bits_per_weight"] for row in decoded if row["side"] in sides[:3]} == {32.0}
    assert all(8 < row["bits_per_weight"] < 9 for row in decoded if row["side"] in sides[3:])
    assert (tmp_path / "tiny-qwen3-fp32" / "config.json").exists()
    results = tmp_path / "results.json"
    results.write_text(text)
    assert main(["--from", str(results), "--plot", str(tmp_path / "plot.png")]) == 0
    assert "llama.cpp is not installed" in capsys.readouterr().out
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_files_end_to_end(
    bare_python: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / name for name in ("a.gguf", "b.gguf")]
    for layers, file in enumerate(files, 1):
        write_gguf(file, model_of(num_hidden_layers=layers, vocab_size=1009))
    options = [*map(str, files), "--contexts", "9", "--batches", "3", "--steps", "5"]
    options += ["--prefills", "0", "--threads", "1", "--activations", "16", "int8", "--json"]
    for kind in (LLAMA, "openvino"):
        options += ["--peer-python", f"{kind}={bare_python}"]
    assert main(options) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["reference"] == LLAMA and [*report["not_installed"]] == [LLAMA, OPENVINO]
    rows = {(row["dtype"], row["side"]): row for row in report["figures"]}
    assert [*rows] == [(f, n) for f in ("a.gguf", "b.gguf") for n in (NATIVE, f"{NATIVE} a8")]
    assert all(row["milliseconds"] > 0 and row["share_of_read"] > 0 for row in rows.values())
    first, second = (report["weights"][file]["count"] for file in ("a.gguf", "b.gguf"))
    assert 1009 * 64 < first < second < 2 * first
    assert all(8.5 <= row["bits_per_weight"] < 10 for row in rows.values())
    results = tmp_path / "results.json"
    results.write_text(json.dumps(report))
    assert main(["--from", str(results), "--plot", str(tmp_path / "plot.png")]) == 0
    shown = capsys.readouterr().out
    assert "× llama.cpp" in shown and "b.gguf: a step reads" in shown
