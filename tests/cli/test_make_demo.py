"""Tests of `tpcompile make-demo`."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.cli.test_main import HEAVY, python
from tpcompile.cli.make_demo import _NAMES
from tpcompile.demo.model import ARCHITECTURES


def test_stdout_is_the_directory_and_the_loss(cli: Cli, tmp_path: Path) -> None:
    ran = cli(f"make-demo {tmp_path}/demo --steps 2 --seed 1")
    assert (ran.status, ran.err) == (0, "")
    assert re.fullmatch(
        re.escape(f"{tmp_path}/demo: ")
        + r"a Qwen3 trained for 2 steps, final loss \d\.\d{4}; its draft is in "
        + re.escape(f"{tmp_path}/demo/draft\n"),
        ran.out,
    )
    assert {path.name for path in tmp_path.iterdir()} == {"demo"}
    for directory in ("demo", "demo/draft"):
        assert (tmp_path / directory / "model.safetensors").is_file()


def test_a_model_with_linear_attention(cli: Cli, tmp_path: Path) -> None:
    ran = cli(f"make-demo {tmp_path}/demo --steps 1 --arch qwen3.5")
    assert (ran.status, ran.err) == (0, "")
    assert "a Qwen3.5 trained for 1 steps" in ran.out
    assert '"qwen3_5_text"' in (tmp_path / "demo" / "config.json").read_text()


def test_a_model_with_experts(cli: Cli, tmp_path: Path) -> None:
    ran = cli(f"make-demo {tmp_path}/demo --steps 1 --arch qwen3-moe")
    assert (ran.status, ran.err) == (0, "")
    assert "a Qwen3-MoE trained for 1 steps" in ran.out
    assert '"qwen3_moe"' in (tmp_path / "demo" / "config.json").read_text()


def test_a_model_that_calls_tools(cli: Cli, tmp_path: Path) -> None:
    ran = cli(f"make-demo {tmp_path}/demo --steps 1 --tools")
    assert (ran.status, ran.err) == (0, "")
    assert "a Qwen3 trained for 1 steps" in ran.out
    assert "tool_call" in (tmp_path / "demo" / "chat_template.jinja").read_text()
    assert '"do_sample": false' in (tmp_path / "demo" / "generation_config.json").read_text()


def test_every_model_has_a_name() -> None:
    assert list(_NAMES) == list(ARCHITECTURES)


def test_an_empty_directory_may_be_the_current_one(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli("make-demo . --steps 1").status == 0
    assert Path("config.json").is_file()
    assert not list(tmp_path.glob(".*"))


def test_a_bar_on_a_terminal(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    ran = cli(f"make-demo {tmp_path}/demo --steps 2")
    assert (ran.status, ran.out.count("\n")) == (0, 1)
    for part in ("model", "draft"):
        assert re.search(rf"training the {part}\b.* 2/2 steps, loss", terminal.getvalue())
    assert "nan" not in terminal.getvalue()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "following arguments are required: DIR"),
        ("{0}", "is not empty"),
        ("{0}/mine", "must be a new or empty directory. Found a file"),
        ("{0}/mine/below", "cannot be written"),
        ("/proc/demo", "cannot be written"),
        ("{0}/new --steps 0", "the number of steps must be an integer of at least 1, got '0'"),
        ("{0}/new --seed -1", "the seed must be an integer of at least 0, got '-1'"),
        ("{0}/new --sed 1", "Did you mean --seed"),
        ("{0}/new --tools --arch qwen3.5", "tools need the arch 'qwen3', got 'qwen3.5'"),
        ("{0}/new --arch qwen35", "Did you mean qwen3.5"),
    ],
)
def test_refusals(cli: Cli, tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "mine").write_text("mine")
    ran = cli("make-demo " + line.format(tmp_path))
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1
    assert message in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_help(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Help fits into 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    ran = cli("make-demo --help")
    assert (ran.status, ran.err) == (0, "")
    assert "examples:\n  tpcompile make-demo " in ran.out
    assert ran.out.isascii()
    assert max(map(len, ran.out.splitlines())) <= 80


def test_a_refused_directory_imports_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    ran = python("-c", HEAVY, "make-demo", str(tmp_path))
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "is not empty" in ran.stderr
    assert "AssertionError" not in ran.stderr
