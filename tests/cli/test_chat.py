"""Tests of `tpcompile chat`."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import GenerationConfig

from tests.cli.conftest import Cli
from tests.runtime.talker import TEMPLATE, talker

pytestmark = pytest.mark.usefixtures("forked_launchers")
OPTIONS = "--backend torch --max-seq-len 128 --temperature 0 --max-new-tokens 4"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("talker")
    for part in talker():
        part.save_pretrained(directory)
    return directory


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Provide a function that sets the lines of stdin, of a terminal or not."""

    def say(*lines: str, terminal: bool = False) -> None:
        stdin = io.StringIO("".join(f"{line}\n" for line in lines))
        monkeypatch.setattr(stdin, "isatty", lambda: terminal)
        monkeypatch.setattr(sys, "stdin", stdin)

    return say


def test_a_conversation(cli: Cli, checkpoint: Path, says: Callable[..., None]) -> None:
    """Each answer is a line of stdout, and depends on earlier turns unless they are reset."""
    says("Anna is", "", "Anna is", "/reset", "Anna is", "/exit", "Anna is")
    ran = cli(f"chat {checkpoint} {OPTIONS}")
    assert ran.status == 0, ran.err
    first, second, third = ran.out.removesuffix("\n").split("\n")
    assert first == third != second
    assert ran.err == "(stopped after 4 tokens)\n" * 3
    says("Anna is")
    assert cli(f"chat {checkpoint} {OPTIONS} --tp 2").out == first + "\n"
    says("Anna is")
    assert cli(f"chat {checkpoint} {OPTIONS} --system", "be brief").out != first + "\n"


def test_a_terminal_gets_prompts_on_stderr(
    cli: Cli, checkpoint: Path, says: Callable[..., None]
) -> None:
    says("/nope", "Anna is", terminal=True)
    ran = cli(f"chat {checkpoint} {OPTIONS}")
    assert (ran.status, ran.out.count("\n")) == (0, 1)
    assert ran.err.startswith("/reset starts anew, /exit or Ctrl-D ends, Ctrl-C stops an answer.\n")
    assert "> error: Unknown command /nope. Known: /reset, /exit." in ran.err
    assert ran.err.endswith("> (stopped after 4 tokens)\n> \n")


class _Interrupting(io.StringIO):
    """A stdout that sends Ctrl-C with the first words of the first answer."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.left = times

    def write(self, text: str) -> int:
        for _ in range(self.left):
            self.left -= 1
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_stops_the_answer_and_twice_the_program(
    cli: Cli,
    checkpoint: Path,
    says: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    times: int,
) -> None:
    says("Anna is", "The grey cat")
    shown = _Interrupting(times)
    monkeypatch.setattr(sys, "stdout", shown)
    ran = cli(f"chat {checkpoint} --backend torch --max-seq-len 60 --temperature 0")
    if times == 1:
        assert (ran.status, ran.err.count("(stopped)\n")) == (0, 1)
        assert shown.getvalue().count("\n") == 2
        assert ran.err.startswith("(stopped)\n(stopped after ")
    else:
        assert (ran.status, ran.err) == (130, "interrupted\n")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_a_chat_template(
    cli: Cli, checkpoint: Path, says: Callable[..., None], tmp_path: Path
) -> None:
    plain, template = tmp_path / "plain", tmp_path / "template.jinja"
    plain.mkdir()
    for file in checkpoint.iterdir():
        if file.name != "chat_template.jinja":
            (plain / file.name).write_bytes(file.read_bytes())
    says("Anna is")
    ran = cli(f"chat {plain}")
    assert (ran.status, ran.out) == (2, "")
    assert f"The tokenizer of {plain} has no chat template" in ran.err
    assert "--chat-template FILE" in ran.err
    template.write_text(TEMPLATE)
    assert cli(f"chat {plain} {OPTIONS} --chat-template {template}").status == 0


BAD = {
    "preset:tiny-qwen3": "--random-weights SEED",
    "preset:tiny-qwen3 --random-weights 0": "Use a checkpoint with a tokenizer",
    "{0}/nowhere": "There is no directory",
    "{0} --chat-template {0}": "The chat template",
    "{0} --max-seq-len 1": "The conversation is too long",
    "{0} --threads x": "the number of threads must be an integer of at least 1, got 'x'",
    "{0} --beams 2": "Unknown option --beams",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input(cli: Cli, checkpoint: Path, says: Callable[..., None], line: str) -> None:
    says("Anna is")
    ran = cli(f"chat {line.format(checkpoint)}")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("error: ") and ran.err.count("\n") == 1
    assert BAD[line] in ran.err


def test_torchrun_is_refused(cli: Cli, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpcompile.runtime.ranks.launched.has_launcher", lambda: True)
    ran = cli(f"chat {checkpoint}")
    assert ran.status == 2 and "start tpcompile serve under torchrun" in ran.err


def test_the_checkpoints_generation_config_and_without_it(
    cli: Cli, checkpoint: Path, says: Callable[..., None], tmp_path: Path
) -> None:
    """It sets the length of answers, unless the command ignores it."""
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    GenerationConfig(max_new_tokens=5).save_pretrained(tmp_path)
    line = f"chat {tmp_path} --backend torch --max-seq-len 40"
    for option, tokens in (("auto", 5), ("none", 33)):
        says("Anna is")
        ran = cli(f"{line} --generation-config {option}")
        assert (ran.status, ran.err) == (0, f"(stopped after {tokens} tokens)\n")
