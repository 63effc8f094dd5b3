"""The options that choose tokens, shared by commands that generate text."""

from __future__ import annotations

import argparse
from typing import Any

from tpcompile.cli.command import Parser, number
from tpcompile.cli.numbers import fraction, temperature

GREEDY = {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0}
"""Greedy decoding. It ignores the numbers, but warns unless they are Hugging Face's defaults."""
_NAMES = ("temperature", "top_k", "top_p")


def add_sampling_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--temperature", metavar="X", type=temperature, help="sampling temperature; 0: greedy"
    )
    parser.add_argument(
        "--top-k", metavar="K", type=number(1, "top-k"), help="sample from the K likeliest tokens"
    )
    parser.add_argument(
        "--top-p",
        metavar="P",
        type=fraction,
        help="sample from the likeliest tokens, up to a total probability of P",
    )
    parser.add_argument("--seed", metavar="S", type=number(0, "the seed"), default=0,
                        help="seed of the sampling; default: 0")  # fmt: skip


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given options for Hugging Face's `generate`: greedy, sampling, or none."""
    if args.temperature == 0:
        return dict(GREEDY)
    given = {name: getattr(args, name) for name in _NAMES if getattr(args, name) is not None}
    return {"do_sample": True, **given} if given else {}
