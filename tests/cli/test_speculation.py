"""Tests of `--speculate`: the text is that of plain decoding, and the counts are told."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.runtime.eager_pair import lively
from tests.runtime.talker import talker

pytestmark = pytest.mark.usefixtures("forked_launchers")
OPTIONS = "--max-seq-len 64 --temperature 0 --max-new-tokens 30"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("talker")
    for part in talker():
        part.save_pretrained(directory)
    return directory


def test_generate(cli: Cli, checkpoint: Path) -> None:
    words = (f"generate {checkpoint} {OPTIONS} --json", "--prompt", "Anna is a")
    plain = json.loads(cli(*words).out)
    assert "drafted" not in plain
    for speculate in ("prompt:4", "prompt", str(checkpoint)):
        ran = cli(*words, "--speculate", speculate)
        assert ran.status == 0, ran.err
        guessed = json.loads(ran.out)
        assert guessed["tokens"] == plain["tokens"]
        assert guessed["drafted"] >= guessed["accepted"] >= 0
        assert guessed["drafted"] == 0 or "guesses accepted" in ran.err


def test_chat(cli: Cli, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = []
    for more in ((), ("--speculate", "prompt:4")):
        monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
        ran = cli(f"chat {checkpoint} {OPTIONS}", *more)
        assert ran.status == 0, ran.err
        answers.append(ran.out)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("command", ["generate", "serve", "chat"])
@pytest.mark.parametrize("value", ["prompt:0", "prompt:16", "prompt:x"])
def test_wrong_numbers(cli: Cli, command: str, value: str) -> None:
    ran = cli(f"{command} preset:tiny-qwen3 --speculate {value}")
    assert ran.status == 2
    assert f"--speculate: must be prompt:N with N from 1 to 15, got '{value}'" in ran.err


def test_beams_take_no_guesses(cli: Cli, checkpoint: Path) -> None:
    ran = cli(f"generate {checkpoint} --prompt x --beams 2 --speculate prompt:4")
    assert ran.status == 2 and "A beam search takes no guesses" in ran.err


def test_linear_attention_is_served_only(cli: Cli, tmp_path: Path) -> None:
    lively("tiny-qwen3.5").save_pretrained(tmp_path)
    ran = cli(f"generate {tmp_path} --prompt-ids 1,2 --speculate prompt:4")
    assert ran.status == 2 and "Use tpcompile serve --speculate" in ran.err
