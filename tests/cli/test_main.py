"""Tests of the command line as a whole: help, refusals, exit status, and output streams."""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import UNSUPPORTED, Cli
from tpcompile import cli as package
from tpcompile.cli.command import Command, Result

TINY = "preset:tiny-qwen3"


def python(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", ["", *package.COMMANDS])
def test_help_has_examples(cli: Cli, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """Help fits into 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    ran = cli(f"{command} --help")
    assert (ran.status, ran.err) == (0, "")
    assert "examples:\n  tpcompile " in ran.out
    assert ran.out.isascii()
    assert max(map(len, ran.out.splitlines())) <= 80


HEAVY = """
import sys
from tpcompile.cli import main
status = main(sys.argv[1:])
heavy = {"torch", "transformers", "rich", "numpy", "triton", "networkx"} & set(sys.modules)
assert not heavy, heavy
raise SystemExit(status)
"""


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("--help", 0),
        ("dump --help", 0),
        ("check --help", 0),
        ("dmp", 2),
        (f"dump {TINY} --tp 0", 2),
        ("plan preset:tiny-qwen4 --tp 2", 2),
        (f"dump {TINY} --tp 2 --rank 2", 2),
    ],
)
def test_help_and_wrong_arguments_import_nothing_heavy(line: str, status: int) -> None:
    ran = python("-c", HEAVY, *line.split())
    assert ran.returncode == status, ran.stderr
    assert bool(ran.stdout) == (status == 0)


ENDING = """
import gc, sys
from tpcompile.cli import main
sys.argv = ["tpcompile", "--version"]
main(sys.argv[1:])
assert gc.isenabled() and not gc.get_freeze_count()
main()
assert gc.get_freeze_count() > 0
"""


def test_only_a_process_that_ends_gives_up_its_garbage() -> None:
    ran = python("-c", ENDING)
    assert ran.returncode == 0, ran.stderr


EXTRAS = """
import contextlib, io, sys
from tpcompile.cli import main
sys.argv = ["tpcompile", *sys.argv[2:]] if sys.argv[1] == "alone" else sys.argv
with contextlib.redirect_stdout(io.StringIO()):
    main(None if sys.argv[0] == "tpcompile" else sys.argv[2:])
loaded = {"accelerate", "scipy"} & set(sys.modules)
assert "transformers" in sys.modules
import scipy  # was only hidden from transformers
raise SystemExit(str(sorted(loaded)))
"""


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("accelerate", "scipy"))),
    reason="needs accelerate and scipy",
)
@pytest.mark.parametrize(
    ("whose", "loaded"), [("alone", "[]"), ("library", "['accelerate', 'scipy']")]
)
def test_only_a_process_of_its_own_does_without_extras(whose: str, loaded: str) -> None:
    """Other code in the process of a caller may need the transformers that has them."""
    ran = python("-c", EXTRAS, whose, *f"plan {TINY} --tp 2".split())
    assert ran.stderr.splitlines()[-1] == loaded, ran.stderr


def test_python_m_and_closed_pipe() -> None:
    ran = python("-m", "tpcompile", "--version")
    assert (ran.returncode, ran.stdout) == (0, f"tpcompile {package.__version__}\n")
    reader, writer = os.pipe()
    os.close(reader)
    closed = subprocess.run(
        [sys.executable, "-m", "tpcompile", "passes"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert (closed.returncode, closed.stderr) == (0, "")


BAD = {
    "--hlp": "Did you mean --help",
    "dmp": "Did you mean dump",
    "dump": "following arguments are required: MODEL",
    f"dump {TINY} --tpp 2": "Did you mean --tp",
    f"dump {TINY} --tp 2 --dif": "Did you mean --diff",
    f"dump {TINY} --tp 2 other": "Unrecognized arguments: other",
    f"dump {TINY} --tp 0": "the number of ranks must be an integer of at least 1, got '0'",
    f"dump {TINY} --tp -1": "the number of ranks must be an integer of at least 1, got '-1'",
    f"plan {TINY} --tp abc": "the number of ranks must be an integer of at least 1, got 'abc'",
    f"check {TINY} --tp 7": "Expected a tp from 1 to 6",
    f"dump {TINY} --tp 2 --rank 2": "Expected --rank 0 to 1",
    f"dump {TINY} --tp 2 --rank -1": "the rank must be an integer of at least 0, got '-1'",
    "dump preset:tiny-qwen --tp 2": "Did you mean tiny-qwen3",
    "plan tiny-qwen3 --tp 2": "write preset:tiny-qwen3",
    "plan Qwen3-0.6B --tp 2": "write preset:qwen3-0.6b",
    "plan preset:TINY-QWEN --tp 2": "Did you mean tiny-qwen3",
    "dump ./nowhere --tp 2": "There is no directory ./nowhere",
    f"dump {TINY} --tp 2 --format jsn": "Did you mean json",
    f"dump {TINY} --tp 2 --dtype float8": "Did you mean float",
    f"dump {TINY} --tp 2 --random-weights 0": "Unknown option --random-weights",
    f"dump {TINY} --tp 2 --diff --json": "Leave out --diff or --format",
    f"dump {TINY} --tp 2 --diff --stop-after capture": "no stage before capture",
    f"dump {TINY} --tp 2 --stop-after fuse-kv": "Did you mean fuse-qkv",
    f"dump {TINY} --tp 2 --print-ir-after raise-nrm": "Did you mean raise-norm",
    f"dump {TINY} --tp 2 --print-ir-after all --stop-after raise-norm": "not allowed with",
    f"dump {TINY} --tp 2 -p raise-nrm": "Unknown pass 'raise-nrm'",
    f"dump {TINY} --tp 2 -p plan-sharding{{tpp=2}}": "Did you mean tp",
    f"dump {TINY} --tp 2 -p plan-sharding{{ffn_grain=x}}": "Invalid value 'x'",
    f"dump {TINY} --tp 2 -p plan-sharding{{tp=4}}": "Remove the option from plan-sharding{tp=4}",
    f"dump {TINY} --tp 2 -p canonicalize,,raise-norm": "Invalid pipeline: ",
    f"dump {TINY} --tp 2 -p canonicalize{{": "Invalid pipeline: ",
    f"check {TINY} --tp 2 -p canonicalize,shard-linears": "Put plan-sharding before",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input(cli: Cli, tmp_path: Path, line: str) -> None:
    """Bad input exits with status 2, one line on stderr, and no other output or files."""
    more = ["--dump-dir", str(tmp_path / "d")] if line.startswith("dump ") else []
    ran = cli(line, *more)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1
    assert BAD[line] in ran.err
    assert list(tmp_path.iterdir()) == []


SAME = {
    "plan preset:tiny-qwen3": "plan preset:tiny-qwen3 --tp 1",
    "plan preset:Tiny-Qwen3 --tp 2 --dtype BF16": "plan preset:tiny-qwen3 --tp 2 --dtype bfloat16",
    "plan preset:tiny-qwen3 --dtype fp32": "plan preset:tiny-qwen3 --dtype auto",
    "dump preset:Tiny-Qwen3 --format TEXT": "dump preset:tiny-qwen3 --tp 1",
    "schedule preset:tiny-qwen3 --target H200 --policy Zigzag --text": (
        "schedule preset:tiny-qwen3 --target h200 --policy zigzag --text"
    ),
    "schedule preset:tiny-qwen3 --target CPU --text": (
        "schedule preset:tiny-qwen3 --target cpu --text --tp 1"
    ),
}


@pytest.mark.parametrize("line", SAME)
def test_names_in_any_case_and_defaults(cli: Cli, line: str) -> None:
    ran, plain = cli(line), cli(SAME[line])
    assert (ran.status, ran.out) == (0, plain.out)


@pytest.mark.parametrize("unsupported", UNSUPPORTED, indirect=True)
def test_models_of_another_kind(cli: Cli, unsupported: Path, tmp_path: Path) -> None:
    ran = cli(f"dump {unsupported} --tp 2 --dump-dir {tmp_path}/d")
    assert (ran.status, ran.out) == (2, "")
    assert "error: " in ran.err
    assert "Expected a causal LM" in ran.err or "Expected a decoder" in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("text", ['{"model_type": ', "{}", '{"model_type": "qwen9"}'])
def test_a_config_that_cannot_be_read(cli: Cli, tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    ran = cli(f"plan {tmp_path} --tp 2")
    assert (ran.status, ran.out) == (2, "")
    assert "could not be read" in ran.err


def test_an_activation_without_a_rule(cli: Cli, tmp_path: Path) -> None:
    from transformers import AutoConfig

    from tpcompile.presets import preset

    config = {**preset("tiny-qwen3"), "hidden_act": "mish"}
    AutoConfig.for_model(**config).save_pretrained(tmp_path)
    ran = cli(f"check {tmp_path} --tp 2 --json")
    assert (ran.status, ran.out) == (2, "")
    assert "Qwen3ForCausalLM computes aten.mish, which tpcompile cannot shard" in ran.err


@pytest.mark.parametrize("other", ["notes.txt", "00-capture.txt/x"])
def test_dump_dir_never_overwrites_other_things(cli: Cli, tmp_path: Path, other: str) -> None:
    path = tmp_path / other
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    ran = cli(f"dump {TINY} --tp 2 --dump-dir {tmp_path}")
    assert (ran.status, ran.out) == (2, "")
    assert path.read_text() == "mine"
    assert cli(f"dump {TINY} --tp 2 --dump-dir {path}").err.startswith("error: ")


def test_no_command_shows_the_help(cli: Cli) -> None:
    ran = cli("")
    assert (ran.status, ran.out) == (2, "")
    assert "commands:" in ran.err


def _command(run: object) -> Command:
    return Command("a test", "", lambda parser: None, run)  # type: ignore[arg-type]


def test_ctrl_c_is_130(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(args: argparse.Namespace) -> Result:
        raise KeyboardInterrupt

    monkeypatch.setitem(package.COMMANDS, "plan", _command(interrupted))
    ran = cli("plan")
    assert (ran.status, ran.out, ran.err) == (130, "", "interrupted\n")


def test_noise_of_libraries_is_not_on_stdout(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(args: argparse.Namespace) -> Result:
        sys.stdout.write("a banner\n")
        return Result("the result\n")

    monkeypatch.setitem(package.COMMANDS, "plan", _command(noisy))
    ran = cli("plan")
    assert (ran.status, ran.out) == (0, "the result\n")
    assert "a banner" in ran.err


def test_a_terminal_without_arrows(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setitem(package.COMMANDS, "plan", _command(lambda args: Result("1 → 2\n")))
    assert package.main(["plan"]) == 0
    assert written.getvalue() == b"1 \\u2192 2\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk() -> None:
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "tpcompile", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ran.returncode == 2
    assert ran.stderr.startswith("error: The result cannot be written to stdout: ")
    assert "No space left" in ran.stderr
    assert ran.stderr.count("\n") == 1
