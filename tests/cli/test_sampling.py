"""Tests of the options that choose tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tpcompile.cli.command import Parser
from tpcompile.cli.sampling import GREEDY, add_sampling_arguments, sampling_of

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
