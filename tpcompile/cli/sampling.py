"""The options that choose tokens, shared by commands that generate text."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from tpcompile.cli.command import Parser, choice, number
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


def add_generation_config_argument(parser: Parser) -> None:
    """Add the option that disables the checkpoint's generation configuration."""
    parser.add_argument(
        "--generation-config",
        metavar="C",
        type=choice("auto", "none"),
        default="auto",
        help="defaults of the sampling options: auto, those of the checkpoint's "
        "generation_config.json, or none, only its special tokens; default: auto",
    )


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given options for Hugging Face's `generate`: greedy, sampling, or none."""
    if args.temperature == 0:
        return dict(GREEDY)
    chosen = {name: getattr(args, name) for name in _NAMES if getattr(args, name) is not None}
    return {"do_sample": True, **chosen} if chosen else {}


def answer_options(args: argparse.Namespace, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of answers for Hugging Face's `generate`, as a server chooses tokens.

    `defaults` are those of requests, by the generation configuration. Unlike Hugging Face, top-k is
    disabled unless it is set. Without any option answers are greedy.
    """
    chosen = sampling_of(args)
    values = {**defaults, **chosen}
    temperature = values.get("temperature") or (1.0 if chosen.get("do_sample") else 0.0)
    options: dict[str, Any] = dict(GREEDY)
    if temperature and args.temperature != 0:
        top_k, top_p = values.get("top_k") or 0, values.get("top_p", 1.0)
        options = {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    return options | {"max_new_tokens": args.max_new_tokens or defaults.get("max_tokens")}
