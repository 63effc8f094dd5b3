"""Tests of `tpcompile explore`: the file, what is said meanwhile, and refusals."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.inspect.explorer.test_page import Page, blob

TINY = "explore preset:tiny-qwen3 --tp 2 --target cpu --workers 2"


def test_one_file(cli: Cli, tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    ran = cli(TINY, "-o", str(output))
    assert (ran.status, ran.out) == (0, "")
    assert list(tmp_path.iterdir()) == [output]
    assert ran.err.splitlines()[-1].startswith(f"wrote {output} (")
    data = json.loads(blob(Page(output.read_text(encoding="utf-8")), "page"))
    assert data["title"] == "tiny-qwen3, tp=2"
    assert data["about"]["model"] == "preset:tiny-qwen3"
    assert [compilation["name"] for compilation in data["compilations"]] == [
        "prompts, tp=2",
        "decode step, tp=2",
    ]


def test_the_default_name(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli(TINY).status == 0
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize("there", [True, False])
def test_open(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    opened: list[str] = []

    def browser(address: str) -> bool:
        opened.append(address)
        return there

    monkeypatch.setattr(webbrowser, "open", browser)
    output = tmp_path / "a page é.html"
    ran = cli(TINY, "-o", str(output), "--open")
    assert ran.status == 0
    assert opened == [output.resolve().as_uri()]
    assert ("there is no browser" in ran.err) is not there
    assert output.is_file()


def test_nothing_is_opened_unless_asked(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda address: pytest.fail(address))
    assert cli(TINY, "-o", str(tmp_path / "page.html")).status == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-o", "."], ". is a directory"),
        (["-o", "missing/page.html"], "There is no directory missing"),
        (["--beside", "x"], "must be a number of ranks"),
        (["--beside", "0"], "must be a number of ranks"),
        (["--beside", "2:"], "must be a number of ranks"),
        (["--beside", "2:no-such-pass"], "Unknown pass 'no-such-pass'"),
        (["--beside", "7"], "7 is more than the number of query heads"),
        (["--random-weights", "1"], "--random-weights applies to --compare only"),
        (["--target", "h3000"], "h3000"),
        (["--policy", "no-such-policy"], "no-such-policy"),
        (["--lowering", "no-such-lowering"], "no-such-lowering"),
        (["--target", "h200", "--measured"], "Found --target h200. Expected --target cpu"),
        (["--workers", "0"], "workers"),
        (["--threads", "2"], "--threads applies to --compare and --measured only"),
        (["--measured", "--threads", "2", "--workers", "3"], "Found --workers 3 and --threads 2"),
        (["--tp", "7"], "--tp 7 is more than the number of query heads"),
    ],
)
def test_refusals(
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = cli("explore preset:tiny-qwen3", *options)
    assert ran.status == 2
    assert ran.out == "" and words in ran.err.replace("\n", " "), ran.err
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_weights_cannot_be_compared(cli: Cli, tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    ran = cli(TINY, "--compare", "-o", str(output))
    assert ran.status == 2
    assert "weights" in ran.err
    assert not output.exists()
