"""Tests of `tpcompile reduce`."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.rewriting.broken import register
from tpcompile.frontend import parse_graph
from tpcompile.rewriting.reproducer import pipeline_of

TINY = "dump preset:tiny-qwen3 --tp 2 --stop-after raise-attention"
_FAILS = """
import sys
from pathlib import Path
text = Path(sys.argv[1]).read_text(encoding="utf-8")
sys.exit(7 if "tpc.swiglu" in text and "# pipeline: fuse-qkv" in text else 0)
"""


@pytest.fixture
def file(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a graph of two layers, and register broken passes."""
    register(monkeypatch)
    path = tmp_path / "graph.txt"
    assert cli(TINY, "-o", str(path)).status == 0
    return path


def _nodes(err: str) -> tuple[int, int]:
    match = re.search(r"^(\d+) → (\d+) nodes, \d+ graphs tried, all with the error: ", err)
    assert match is not None, err
    return int(match.group(1)), int(match.group(2))


def test_a_reproducer_is_reduced_to_one_that_fails_alike(cli: Cli, file: Path) -> None:
    small = file.with_name("small.txt")
    ran = cli(f"reduce {file} -p drop-gates -o {small}")
    assert (ran.status, ran.out) == (0, "")
    before, after = _nodes(ran.err)
    assert before == 78 and after <= 15
    assert ran.err.endswith(": drop-gates: swiglu\n")
    text = small.read_text(encoding="utf-8")
    assert pipeline_of(text) == "drop-gates"
    assert len(parse_graph(text).graph.nodes) == after
    again = cli(f"opt {small}")
    assert again.status == 1
    assert "The pass drop-gates left an invalid graph" in again.err


def test_numbers(cli: Cli, file: Path) -> None:
    ran = cli(f"reduce {file} -p skip-norm --numbers")
    assert ran.status == 0
    assert _nodes(ran.err)[1] <= 15
    assert ran.err.endswith(": wrong numbers\n")
    parse_graph(ran.out)


def test_a_command_decides(cli: Cli, file: Path) -> None:
    """The command gets a file with the graph and the pipeline."""
    script = file.with_name("fails.py")
    script.write_text(_FAILS, encoding="utf-8")
    command = f"{shlex.quote(sys.executable)} {shlex.quote(str(script))}"
    ran = cli(f"reduce {file} -p fuse-qkv", "--command", command)
    assert ran.status == 0
    assert _nodes(ran.err)[1] <= 12
    assert ran.err.endswith(": status 7\n")
    assert ran.out.count("tpc.swiglu") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "There is nothing that may fail. Expected passes (-p), a reproducer"),
        (["--numbers"], "There is nothing that may fail"),
        (["-p", "fuse-qkv"], "There is no error to reduce"),
        (["-p", "no-such-pass"], "Unknown pass 'no-such-pass'"),
        (["--command", "/no/such/command"], "/no/such/command cannot be run"),
        (["--command", "'"], "--command is not valid"),
        (["--command", ""], "--command must not be empty"),
        (["--command", "x", "--numbers"], "not allowed with argument"),
        (["-p", "fuse-qkv", "-o", "/"], "/ is a directory"),
    ],
)
def test_refusals(cli: Cli, file: Path, options: list[str], message: str) -> None:
    ran = cli(f"reduce {file}", *options)
    assert (ran.status, ran.out) == (2, "")
    assert message in ran.err
