"""Tests of `tpcompile opt`."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli

TINY = "dump preset:tiny-qwen3 --tp 2"


@pytest.fixture
def file(cli: Cli, tmp_path: Path) -> Path:
    """Write the graph after kv-heads."""
    path = tmp_path / "graph.txt"
    ran = cli(TINY, "--stop-after", "kv-heads", "-o", str(path))
    assert (ran.status, ran.out) == (0, "")
    return path


def _give(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))


def test_no_pass_prints_the_text_back(
    cli: Cli, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = file.read_text(encoding="utf-8")
    assert cli(f"opt {file}", "-p", "").out == cli(f"opt {file}").out == text
    _give(monkeypatch, text.encode())
    assert cli("opt - -o", str(file.with_name("copy.txt"))).out == ""
    assert file.with_name("copy.txt").read_text(encoding="utf-8") == text


def test_the_passes_that_are_left_give_what_dump_gives(cli: Cli, file: Path) -> None:
    left = "vocab-parallel,insert-collectives,fuse-qkv,fuse-gate-up,fuse-add-norm,select-rows"
    ran = cli(f"opt {file} -p {left},greedy-head,cache-kv")
    assert (ran.status, ran.err, ran.out) == (0, "", cli(TINY).out)


def test_ranks_of_a_captured_graph(cli: Cli, tmp_path: Path) -> None:
    graph = tmp_path / "graph.txt"
    cli(TINY, "--stop-after", "capture", "-o", str(graph))
    assert cli(f"opt {graph} -p standard --tp 2").out == cli(TINY).out
    refused = cli(f"opt {graph} -p fuse-qkv --tp 2")
    assert refused.status == 2
    assert "--tp 2 has no effect without plan-sharding" in refused.err


def test_verify_only(cli: Cli, file: Path) -> None:
    ran = cli(f"opt {file} --verify-only")
    assert (ran.status, ran.out) == (0, f"{file}: the graph is valid (82 nodes)\n")
    refused = cli(f"opt {file} --verify-only -o", str(file))
    assert (refused.status, "runs no passes and prints no graph" in refused.err) == (2, True)


def test_an_invalid_graph_is_status_1_and_not_lowered(cli: Cli, file: Path) -> None:
    """The problem has the line of the file; the graph goes nowhere."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    (number,) = [n for n, line in enumerate(lines, 1) if line.startswith("  %l1_o_proj_whole =")]
    lines[number - 1] = lines[number - 1].replace(" Replicate", " Partial(sum)")
    file.write_text("".join(lines), encoding="utf-8")
    verified, ran = cli(f"opt {file} --verify-only"), cli(f"opt {file} -p vocab-parallel")
    assert (verified.status, verified.err, ran.status, ran.out) == (1, "", 1, "")
    assert verified.out == ran.err
    assert f"{file}: 1 problem\n  %l1_o_proj_whole (line {number}) breaks the rule type" in ran.err


def test_diffs_and_stages_begin_at_the_input(cli: Cli, file: Path) -> None:
    diff = cli(f"opt {file} -p fuse-qkv --diff").out.splitlines()
    assert diff[:3] == [
        "# fuse-qkv: 2 matches, 82 → 82 nodes",
        "--- after input",
        "+++ after fuse-qkv",
    ]
    shown = cli(f"opt {file} -p fuse-qkv --print-ir-after all").out
    assert [line for line in shown.splitlines() if line.startswith("#")] == [
        "# after input: 82 nodes",
        "# after fuse-qkv: 2 matches, 82 → 82 nodes",
    ]
    assert "Known: all, input, fuse-qkv" in cli(f"opt {file} -p fuse-qkv --print-ir-after x").err


def test_other_forms(cli: Cli, file: Path) -> None:
    graph = json.loads(cli(f"opt {file} --format json").out)
    assert (graph["tp"], len(graph["nodes"])) == (2, 82)
    assert cli(f"opt {file} --format dot").out.startswith('digraph "tiny-qwen3"')
    assert "modeling_qwen3" not in cli(f"opt {file} --no-origin").out.partition("layouts")[2]
    assert "fuse-qkv" in cli(f"opt {file} -p fuse-qkv --timing").err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--rank 0", "text of one rank cannot be parsed. At {file}, line 1, column 17."),
        ("--layer 1", "text of one layer cannot be parsed. At {file}, line 1, column 17."),
        ("--rank 1 --layer 1", "text of one rank cannot be parsed"),
        ("--print-ir-after all", "The text goes on after the result. At {file}, line "),
        ("--json", "This is not the text of a graph. At {file}, line 1, column 1."),
        ("--diff", "This is not the text of a graph. At {file}, line 2, column 1."),
    ],
)
def test_other_output_of_dump_is_refused(
    cli: Cli, tmp_path: Path, options: str, message: str
) -> None:
    file = tmp_path / "graph.txt"
    cli(TINY, *options.split(), "-o", str(file))
    ran = cli(f"opt {file}")
    assert (ran.status, ran.out) == (2, "")
    assert message.format(file=file) in ran.err


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "The text of a graph is empty. At stdin."),
        (b"graph \xff", "stdin is not text in UTF-8. Found the byte 0xff."),
        (b"graph x (tp=1)\n", "The text of the graph ends before its result. At stdin, line 2."),
        (b"graph x (tp=0)\n", "tp must be from 1 to 512, got 0. At stdin, line 1, column "),
    ],
)
def test_stdin_without_a_graph_is_refused(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, data: bytes, message: str
) -> None:
    _give(monkeypatch, data)
    ran = cli("opt -")
    assert (ran.status, ran.out) == (2, "")
    assert message in ran.err


def test_a_file_may_have_the_name_stdin(
    cli: Cli, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stdin").write_bytes(file.read_bytes())
    monkeypatch.chdir(tmp_path)
    _give(monkeypatch, b"")
    assert cli("opt stdin").out.encode() == file.read_bytes()


def test_files_that_cannot_be_read_are_refused(cli: Cli, tmp_path: Path) -> None:
    assert f"{tmp_path} cannot be read. Found Is a directory." in cli(f"opt {tmp_path}").err
    assert "Found No such file or directory." in cli(f"opt {tmp_path}/none").err


def test_line_ends_and_marks_of_windows_are_accepted(cli: Cli, file: Path) -> None:
    text = file.read_bytes()
    file.write_bytes(b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n"))
    assert cli(f"opt {file}").out.encode() == text


def test_columns_count_the_indentation(cli: Cli, file: Path) -> None:
    lines = file.read_text(encoding="utf-8").splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if line.startswith("  %l1_o_proj =")]
    lines[number - 1] = lines[number - 1].replace("aten.linear", "aten.liner")
    file.write_text("\n".join(lines), encoding="utf-8")
    error = cli(f"opt {file}").err
    column = lines[number - 1].index("aten.liner") + 1
    assert f"There is no op aten.liner. At {file}, line {number}, column {column}." in error
    assert "Did you mean aten.linear" in error


@pytest.mark.parametrize("pipeline", ["no-such-pass", "fuse-qkv,", "fuse-qkv{x=1}"])
def test_an_unknown_pass_is_refused(cli: Cli, file: Path, pipeline: str) -> None:
    ran = cli(f"opt {file} -p {pipeline}")
    assert (ran.status, ran.out) == (2, "")
