"""Tests of `tpcompile completion`: the scripts, run by the shells that are here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tpcompile import cli as package
from tpcompile.cli.command import Parser, choice
from tpcompile.cli.completion import Argument, _known_values, arguments_of, bash, fish, zsh
from tpcompile.vm.targets import TARGETS

SHELLS = ("bash", "zsh", "fish")

COMPLETED = {
    "tpcompile cal": ["calibrate"],
    "tpcompile schedule x --target h": ["h100", "h200"],
    "tpcompile schedule x --target=h2": ["h200"],
    "tpcompile schedule x --policy zig": ["zigzag"],
    "tpcompile plan preset:qwen3-0": ["qwen3-0.6b"],  # the shell replaces what follows the colon
    "tpcompile plan x --dtype b": ["bfloat16", "bf16"],
    "tpcompile plan x --json --t": ["--tp", "--timing"],
    "tpcompile dump x -p raise-n": ["raise-norm"],
    "tpcompile dump x --stop-after fuse-q": ["fuse-qkv"],
    "tpcompile dump x --rank ": [],
    "tpcompile generate x --backend nat": ["native"],
    "tpcompile serve x --thr": ["--threads"],
    "tpcompile completion ": ["bash", "zsh", "fish"],
    "tpcompile nonsense ": [],
}


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    known = _known_values()
    commands = {
        name: (command.summary, arguments_of(command.parser(name), known))
        for name, command in package.COMMANDS.items()
    }
    path = tmp_path_factory.mktemp("completion") / "script"
    path.write_text(bash(commands))
    return path


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("line", COMPLETED)
def test_bash_completes(line: str, script: Path) -> None:
    commands = (
        'source "$1"; COMP_WORDBREAKS="=:"; COMP_LINE=$2 COMP_POINT=${#2}; _tpcompile; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    ran = subprocess.run(
        ["bash", "--norc", "-c", commands, "bash", str(script), line],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stderr == ""
    assert ran.stdout.split() == COMPLETED[line]


@pytest.mark.parametrize("shell", SHELLS)
def test_each_script_is_valid_and_names_what_there_is(cli: Cli, tmp_path: Path, shell: str) -> None:
    ran = cli(f"completion {shell}")
    assert (ran.status, ran.err) == (0, "")
    for word in (*package.COMMANDS, *TARGETS, "preset:qwen3-0.6b", "raise-norm", "critical-path"):
        assert word in ran.out, word
    assert "@c" not in ran.out  # the places of commands and cases are filled
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not here to read the script")
    (tmp_path / "script").write_text(ran.out)
    subprocess.run([shell, "-n", str(tmp_path / "script")], check=True)


def test_texts_are_quoted() -> None:
    commands = {"do": ("don't", (Argument(("-x", "--long"), True, ("a", "b"), "it's a \\"),))}
    assert fish(commands).splitlines()[1:] == [
        "complete -c tpcompile -f -n __fish_use_subcommand -a do -d 'don\\'t'",
        "complete -c tpcompile -n '__fish_seen_subcommand_from do' -s x -l long -r -a 'a b' "
        "-d 'it\\'s a \\\\'",
    ]
    assert "        'do:don'\\''t'\n" in zsh(commands)


def test_arguments_with_their_values() -> None:
    parser = Parser(prog="x")
    parser.add_argument("model", help="the model")
    parser.add_argument("--one", "-1", type=choice("a", "b"))
    parser.add_argument("--flag", action="store_true")
    assert arguments_of(parser, {"model": ("preset:x",)}) == (
        Argument((), True, ("preset:x",), "the model"),
        Argument(("--one", "-1"), True, ("a", "b"), ""),
        Argument(("--flag",), False, (), ""),
    )


def test_every_known_value_belongs_to_an_argument() -> None:
    """An argument that is renamed would silently lose its values."""
    names = {
        action.dest
        for command in package.COMMANDS.values()
        for action in command.parser("x")._actions
    }
    assert set(_known_values()) <= names


def test_an_unknown_shell(cli: Cli) -> None:
    ran = cli("completion fsh")
    assert ran.status == 2 and "Did you mean fish" in ran.err
