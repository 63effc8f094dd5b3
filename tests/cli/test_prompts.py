"""Tests of where a prompt comes from."""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

import pytest

from tpcompile.cli.command import Parser
from tpcompile.cli.prompts import add_prompt_arguments, prompt_of
from tpcompile.errors import UsageError


class _Stdin(io.TextIOWrapper):
    def __init__(self, data: bytes, terminal: bool = False) -> None:
        super().__init__(io.BytesIO(data), encoding="ascii")  # stdin is UTF-8 in any locale
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def _args(*words: str) -> argparse.Namespace:
    parser = Parser(prog="x")
    add_prompt_arguments(parser)
    return parser.parse(words)


def test_an_option_and_a_file(tmp_path: Path) -> None:
    assert prompt_of(_args("--prompt", " a\n")) == " a\n"
    assert prompt_of(_args("--prompt-ids", "1,2")) is None
    for data in (b"caf\xc3\xa9 \n\n", b"caf\xc3\xa9 \n\r\n"):
        (tmp_path / "a").write_bytes(data)
        assert prompt_of(_args("--prompt-file", str(tmp_path / "a"))) == "café \n"


@pytest.mark.parametrize("words", [["--prompt", "-"], []])
def test_stdin(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", _Stdin("é\nb\n".encode()))
    assert prompt_of(_args(*words)) == "é\nb"


def test_a_dash_reads_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", _Stdin(b"a\n", terminal=True))
    assert prompt_of(_args("--prompt", "-")) == "a"


def test_a_terminal_is_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", _Stdin(b"a\n", terminal=True))
    with pytest.raises(UsageError, match=r"There is no prompt\. Expected --prompt, --prompt-file"):
        prompt_of(_args())


@pytest.mark.parametrize(
    ("data", "message"), [(b"\n", "empty. At stdin"), (b"\xff", "must be UTF-8")]
)
def test_bad_stdin(data: bytes, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", _Stdin(data))
    with pytest.raises(UsageError, match=message):
        prompt_of(_args())


def test_bad_options(tmp_path: Path) -> None:
    for words, message in (
        (["--prompt", " "], "The prompt is empty. At --prompt"),
        (["--prompt-file", str(tmp_path)], "cannot be read"),
        (["--prompt-file", "a", "--prompt", "b"], "not allowed with"),
    ):
        with pytest.raises(UsageError, match=message):
            prompt_of(_args(*words))


def test_no_stdin_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of torchrun share one stdin, which only one of them could read."""
    monkeypatch.setattr("tpcompile.runtime.ranks.launched.has_launcher", lambda: True)
    monkeypatch.setattr(sys, "stdin", _Stdin(b"a"))
    with pytest.raises(UsageError, match="Use --prompt or --prompt-file"):
        prompt_of(_args())
