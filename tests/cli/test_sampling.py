"""Tests of the options that choose tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tpcompile.cli.command import Parser
from tpcompile.cli.sampling import GREEDY, add_sampling_arguments, answer_options, sampling_of

CHOSEN: dict[str, dict[str, Any]] = {
    "": {},
    "--seed 3": {},
    "--temperature 0": GREEDY,
    "--temperature 0.0 --top-k 5": GREEDY,
    "--temperature 0.5": {"do_sample": True, "temperature": 0.5},
    "--top-k 5 --top-p 0.5": {"do_sample": True, "top_k": 5, "top_p": 0.5},
}


@pytest.mark.parametrize("line", CHOSEN)
def test_options_of_generate(line: str) -> None:
    parser = Parser(prog="x")
    add_sampling_arguments(parser)
    assert sampling_of(parser.parse(line.split())) == CHOSEN[line]


OF_CHECKPOINT = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1, "max_tokens": 30}
SAMPLED = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 1.0}
ANSWERS: dict[tuple[str, bool], dict[str, Any]] = {
    ("", True): {**SAMPLED, "max_new_tokens": 30},
    ("", False): {**GREEDY, "max_new_tokens": None},
    ("--temperature 0", True): {**GREEDY, "max_new_tokens": 30},
    ("--temperature 0.9 --top-p 0.5", True): {
        **SAMPLED, "temperature": 0.9, "top_p": 0.5, "max_new_tokens": 30
    },
    ("--top-k 5", False): {
        "do_sample": True, "temperature": 1.0, "top_k": 5, "top_p": 1.0, "max_new_tokens": None
    },
    ("--max-new-tokens 4", True): {**SAMPLED, "max_new_tokens": 4},
}  # fmt: skip


@pytest.mark.parametrize(("line", "stated"), ANSWERS)
def test_options_of_answers(line: str, stated: bool) -> None:
    """Options come first, then the checkpoint's, and top-k is off unless it is set."""
    parser = Parser(prog="x")
    add_sampling_arguments(parser)
    parser.add_argument("--max-new-tokens", type=int)
    args = parser.parse(line.split())
    assert answer_options(args, OF_CHECKPOINT if stated else {}) == ANSWERS[line, stated]
