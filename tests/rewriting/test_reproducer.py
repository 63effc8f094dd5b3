"""A pass that fails leaves a reproducer, and the error says how to run it."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

import tpcompile
from tests.captures import captured_once
from tests.rewriting.broken import register
from tpcompile.cli import main
from tpcompile.errors import CompileError, ShardingError, UsageError, VerifyError
from tpcompile.ir.text import format_graph
from tpcompile.rewriting.reproducer import (
    is_worth_reproducing,
    pipeline_of,
    reproducer_of,
    with_pipeline,
    write_reproducer,
)

TINY = "preset:tiny-qwen3"
BROKEN = "canonicalize,raise-norm,raise-rope,raise-swiglu,raise-attention,drop-gates,plan-sharding"
COMMANDS = ("dump --tp 1", "plan --tp 1", "check --tp 1", "schedule --target cpu")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, captured_once: None) -> Path:
    """Provide the directory of reproducers, and register broken passes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    register(monkeypatch)
    return tmp_path


def _only(place: Path) -> Path:
    (file,) = place.glob("tpcompile-*.txt")
    return file


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_writes_one_and_says_how_to_run_it(
    command: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reproducer has the graph before the pass, and the passes that were left."""
    assert main([*command.split(), TINY, "-p", BROKEN]) != 0
    file = _only(place)
    assert f"To reproduce: `tpcompile opt {file}`." in capsys.readouterr().err
    text = file.read_text(encoding="utf-8")
    assert pipeline_of(text) == "drop-gates,plan-sharding{tp=1}"
    for name in ("tpcompile", "torch", "transformers", "Python"):
        assert re.search(rf"^# versions: .*\b{name} \d", text, re.MULTILINE)
    assert "# error: The pass drop-gates left an invalid graph" in text


def test_opt_reproduces_the_error_and_writes_no_copy(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = place / "graph.txt"
    graph.write_text(format_graph(captured_once(TINY).graph), encoding="utf-8")
    assert main(["opt", str(graph), "-p", BROKEN]) == 1
    first, file = capsys.readouterr().err, _only(place)
    assert f"`tpcompile opt {file}`" in first
    assert main(["opt", str(file)]) == 1
    again = capsys.readouterr().err
    assert "The pass drop-gates left an invalid graph" in again
    assert _only(place) == file


def test_compile_adds_it_to_the_error(place: Path) -> None:
    with pytest.raises(VerifyError, match="left an invalid graph") as failed:
        tpcompile.compile(TINY, simulate=True, random_weights=0, pipeline=BROKEN)
    assert str(failed.value).endswith(f"To reproduce: `tpcompile opt {_only(place)}`.")


def test_an_exception_of_a_pass_gets_it_as_a_note(place: Path) -> None:
    passes = BROKEN.replace("drop-gates", "divide")
    with pytest.raises(ZeroDivisionError) as failed:
        tpcompile.schedule(TINY, pipeline=passes)
    file = _only(place)
    assert f"To reproduce: `tpcompile opt {file}`." in failed.value.__notes__
    assert "# error: ZeroDivisionError: " in file.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "options",
    [["--tp", "7"], ["--tp", "2", "-p", "no-such-pass"], ["--tp", "2", "-p", "plan-sharding{x=1}"]],
)
def test_a_refusal_of_bad_input_writes_none(options: list[str], place: Path) -> None:
    assert main(["dump", TINY, *options]) == 2
    assert list(place.iterdir()) == []


def test_refusals_are_not_worth_reproducing() -> None:
    assert not is_worth_reproducing(UsageError("x"))
    assert not is_worth_reproducing(ShardingError("x"))
    assert is_worth_reproducing(CompileError("x"))
    assert is_worth_reproducing(ZeroDivisionError())


def test_a_directory_that_cannot_be_written_is_not_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere/at/all")
    assert write_reproducer("graph x (tp=1)").startswith("A reproducer cannot be written: ")


def test_the_pipeline_is_read_from_the_comments_only() -> None:
    graph = 'graph x (tp=1)\n# pipeline: after\nmodel "# pipeline: b"\n'
    assert pipeline_of(graph) is None
    text = reproducer_of(graph, "fuse-qkv", ValueError("two\nlines\n# pipeline: of error"))
    assert pipeline_of(text) == pipeline_of(text.replace("\n", "\r\n")) == "fuse-qkv"
    assert with_pipeline(graph, "") == graph
    assert text.endswith(with_pipeline(graph, "fuse-qkv"))


def test_a_long_error_is_cut() -> None:
    text = reproducer_of("graph", "p", ValueError("x" * 10_000))
    assert len(text) < 1000
