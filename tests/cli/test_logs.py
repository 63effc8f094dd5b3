"""Tests of the log that `-v` writes to stderr."""

from __future__ import annotations

import logging
import re

import pytest

from tests.cli.conftest import Cli
from tpcompile.cli.logs import logged

TINY = "preset:tiny-qwen3"
RUN = f"generate {TINY} --random-weights 0 --prompt-ids 1,2,3 --max-new-tokens 3 --max-seq-len 64"


def test_passes_and_programs(cli: Cli) -> None:
    ran, plain = cli(f"{RUN} -v"), cli(RUN)
    assert (ran.status, ran.out) == (0, plain.out)
    manager = "tpcompile.rewriting.manager: "
    lines = ran.err.splitlines()
    passes = [line.removeprefix(manager) for line in lines if line.startswith(manager)]
    assert re.fullmatch(r"raise-norm: \d+ matches, \d+ → \d+ nodes, \d+\.\d ms", passes[2])
    assert any(line.startswith("plan-sharding{tp=1}: ") for line in passes)
    assert "tpcompile.runtime.programs: program for a batch of 1: " in ran.err
    assert "modules: a step" not in ran.err
    assert "tpcompile" not in plain.err


def test_steps_too(cli: Cli) -> None:
    log = cli(f"{RUN} -vv").err
    assert log.count("tpcompile.runtime.ranks.program: modules: a step of 3 tokens\n") == 1
    assert log.count("tpcompile.runtime.ranks.program: program: 1 steps of 1 sequences\n") == 2


def test_before_the_command(cli: Cli) -> None:
    ran, after = cli(f"-v --verbose plan {TINY}"), cli(f"plan {TINY} -v --verbose")
    assert (ran.status, ran.out) == (0, after.out)
    assert cli("-v").status == cli("-v --no-such").status == 2


def test_the_log_ends_with_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("tpcompile.x")
    handlers, level = logging.getLogger("tpcompile").handlers[:], log.getEffectiveLevel()
    with logged(1):
        log.info("é %d", 1)
        log.debug("two")
    assert capsys.readouterr().err == "tpcompile.x: é 1\n"
    with logged(3):
        log.debug("two")
    assert capsys.readouterr().err == "tpcompile.x: two\n"
    assert logging.getLogger("tpcompile").handlers == handlers
    assert log.getEffectiveLevel() == level
