"""Prompts from an option, a file or standard input."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tpcompile.cli.command import Parser
from tpcompile.cli.numbers import token_ids
from tpcompile.errors import UsageError

_STDIN = "-"


def add_prompt_arguments(parser: Parser) -> None:
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt",
        metavar="TEXT",
        help="the prompt, or - to read it from stdin; default: stdin, if it is not a terminal",
    )
    prompt.add_argument(
        "--prompt-file",
        metavar="FILE",
        type=Path,
        help="read the prompt from a UTF-8 file, without the line break at its end",
    )
    prompt.add_argument(
        "--prompt-ids", metavar="IDS", type=token_ids, help="the prompt as token ids, e.g. 1,2,3"
    )


def prompt_of(args: argparse.Namespace) -> str | None:
    """Return the text of the prompt, or None if it is given as ids."""
    if args.prompt_ids:
        return None
    if args.prompt_file is not None:
        return _text(_read(args.prompt_file), str(args.prompt_file))
    if args.prompt not in (None, _STDIN):
        return _checked(args.prompt, "--prompt")
    return _from_stdin(args.prompt)


def _from_stdin(prompt: str | None) -> str:
    if prompt is None and sys.stdin.isatty():
        raise UsageError(
            "There is no prompt",
            expected="--prompt, --prompt-file, --prompt-ids, or a prompt on stdin",
            hint='For example: --prompt "Once upon a time"',
        )
    from tpcompile.runtime.ranks.launched import has_launcher

    if has_launcher():
        raise UsageError(
            "Under torchrun the processes share stdin, so it cannot hold the prompt",
            hint="Use --prompt or --prompt-file",
        )
    return _text(sys.stdin.buffer.read(), "stdin")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"The prompt file {path} cannot be read", got=str(error)) from error


def _text(data: bytes, where: str) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise UsageError("The prompt must be UTF-8 text", where=where, got=str(error)) from error
    return _checked(text.removesuffix("\n").removesuffix("\r"), where)


def _checked(text: str, where: str) -> str:
    if not text.strip():
        raise UsageError(
            "The prompt is empty", where=where, hint='Give some text: --prompt "Once upon a time"'
        )
    return text
