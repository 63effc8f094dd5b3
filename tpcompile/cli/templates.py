"""The options of chat templates, shared by commands that chat."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tpcompile.cli.command import Parser
from tpcompile.errors import UsageError


def add_template_arguments(parser: Parser) -> None:
    """Add the chat template, and its variables."""
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        type=Path,
        help="a Jinja template instead of the checkpoint's",
    )
    parser.add_argument(
        "--chat-template-kwargs",
        metavar="JSON",
        type=_variables,
        default={},
        help="variables of the chat template, such as '{\"enable_thinking\": false}'",
    )


def set_template(args: argparse.Namespace, tokenizer: Any) -> None:
    """Set the template of `--chat-template`, and check the variables of the template."""
    from tpcompile.runtime.text import check_template_options

    check_template_options("--chat-template-kwargs", args.chat_template_kwargs)
    if args.chat_template is None:
        return
    try:
        tokenizer.chat_template = args.chat_template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"The chat template {args.chat_template} cannot be read", got=str(error)
        ) from error


def _variables(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"the variables must be a JSON object such as '{{\"enable_thinking\": false}}', "
            f"got {text!r}"
        )
    return value
