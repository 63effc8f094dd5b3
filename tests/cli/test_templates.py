"""Tests of the options of chat templates: `chat`, `generate --chat` and `serve` share them."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.runtime.talker import talker

pytestmark = pytest.mark.usefixtures("forked_launchers")

THINKING = "{{ 'Anna is a' if enable_thinking | default(true) else 'The grey cat' }}"
OPTIONS = "--backend torch --max-seq-len 64 --temperature 0 --max-new-tokens 4"
OFF = '{"enable_thinking": false}'


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("talker")
    model, tokenizer = talker()
    tokenizer.chat_template = THINKING
    for part in (model, tokenizer):
        part.save_pretrained(directory)
    return directory


@pytest.fixture(params=["chat", "generate"])
def answer(
    request: pytest.FixtureRequest, cli: Cli, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> object:
    """Provide a function that answers "x" with more options, by either command."""

    def run(*more: str) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO("x\n"))
        words = ["--chat", "--prompt", "x"] if request.param == "generate" else []
        ran = cli(f"{request.param} {checkpoint} {OPTIONS}", *words, *more)
        assert ran.status == 0, ran.err
        return ran.out

    return run


def test_variables_and_files_of_templates(answer: object, tmp_path: Path) -> None:
    assert callable(answer)
    thinking, plain = answer(), answer("--chat-template-kwargs", OFF)
    assert thinking != plain
    assert answer("--chat-template-kwargs", '{"enable_thinking": true}') == thinking
    template = tmp_path / "plain.jinja"
    template.write_text("The grey cat")
    assert answer("--chat-template", str(template)) == plain


BAD = {
    "[1]": "the variables must be a JSON object",
    "{": "the variables must be a JSON object",
    '{"tokenize": false}': "--chat-template-kwargs must be variables of the chat template, "
    "got 'tokenize'",
    '{"add_generation_prompt": false}': "got 'add_generation_prompt'",
    '{"messages": []}': "got 'messages'",
}


@pytest.mark.parametrize("command", ["chat", "generate --chat --prompt x", "serve --port 0"])
@pytest.mark.parametrize("text", BAD)
def test_bad_variables(cli: Cli, checkpoint: Path, command: str, text: str) -> None:
    """They are refused before the model is loaded."""
    name, *words = command.split()
    ran = cli(f"{name} {checkpoint}", *words, "--chat-template-kwargs", text)
    assert (ran.status, ran.out) == (2, "")
    assert BAD[text] in ran.err


@pytest.mark.parametrize("command", ["chat", "generate --chat --prompt x", "serve --port 0"])
def test_a_template_that_cannot_be_read(cli: Cli, checkpoint: Path, command: str) -> None:
    name, *words = command.split()
    ran = cli(f"{name} {checkpoint}", *words, "--chat-template", str(checkpoint))
    assert ran.status == 2 and f"The chat template {checkpoint} cannot be read" in ran.err


def test_generate_applies_a_template_with_chat_only(cli: Cli, checkpoint: Path) -> None:
    ran = cli(f"generate {checkpoint} --prompt x", "--chat-template-kwargs", OFF)
    assert ran.status == 2 and "Add --chat, or leave out" in ran.err


def test_an_unknown_form_of_calls(cli: Cli, checkpoint: Path) -> None:
    ran = cli(f"serve {checkpoint} --port 0 --tool-parser herms")
    assert (ran.status, ran.out) == (2, "")
    assert "Unknown tool parser 'herms'" in ran.err and "hermes" in ran.err
