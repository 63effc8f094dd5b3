"""The option `--speculate`, shared by commands that continue text."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tpcompile.cli.command import Parser
from tpcompile.errors import UnsupportedError, UsageError
from tpcompile.guesses import prompt_guesses, takes_prompt

if TYPE_CHECKING:
    from tpcompile.runtime.model import CompiledModel


def add_speculate_argument(parser: Parser) -> None:
    """Add the option that guesses tokens."""
    parser.add_argument(
        "--speculate",
        metavar="prompt:N|DIR",
        type=_speculate,
        help="guess tokens, so that a step computes several: prompt:8 guesses up to 8 tokens that "
        "followed the last ones earlier in the text, and DIR is a smaller model with the same "
        "vocabulary that guesses them; default: none",
    )


def _speculate(text: str) -> str:
    try:
        if takes_prompt(text):
            prompt_guesses(text)
    except UsageError as error:
        wrong = f"must be prompt:N with N from 1 to 15, got {text!r}"
        raise argparse.ArgumentTypeError(wrong) from error
    return text


@contextmanager
def draft_of(args: argparse.Namespace, model: CompiledModel) -> Iterator[str | Any | None]:
    """Yield the guesses of `--speculate` for an engine: text, or a compiled draft model."""
    if args.speculate is None or takes_prompt(args.speculate):
        yield args.speculate
        return
    from tpcompile.api import compile
    from tpcompile.runtime.ranks.launched import has_launcher

    if has_launcher():
        raise UnsupportedError(
            "Under torchrun, a draft model is not supported: each process is a rank of one model",
            got=f"--speculate {args.speculate}",
            hint="Guess from the text, --speculate prompt:8, or leave out torchrun and give --tp",
        )
    backend = {"backend": args.backend, "device": args.device, "threads": args.threads}
    with compile(args.speculate, max_seq_len=_longest(args.speculate, model), **backend) as draft:
        yield draft


def _longest(draft: str, model: CompiledModel) -> int:
    """Return the length of sequences of a draft model: that of the model, if it can be so long."""
    from tpcompile.frontend import config_of
    from tpcompile.frontend.positions import longest_of

    return min(model.max_seq_len, longest_of(config_of(draft), None))


@contextmanager
def assistance_of(args: argparse.Namespace, model: CompiledModel) -> Iterator[dict[str, Any]]:
    """Yield the guesses of `--speculate` as options of Hugging Face's `generate`."""
    if args.speculate is not None and model.keeps_cache and model.keeps_states:
        raise UsageError(
            "A model with linear attention is not assisted here: Hugging Face's loop would have "
            "to take back its states",
            got=f"--speculate {args.speculate}",
            hint="Use tpcompile serve --speculate, whose engine keeps a state for each guess",
        )
    with draft_of(args, model) as draft:
        if draft is None:
            yield {}
        elif isinstance(draft, str):
            yield {"prompt_lookup_num_tokens": prompt_guesses(draft)}
        else:
            yield {"assistant_model": draft}
