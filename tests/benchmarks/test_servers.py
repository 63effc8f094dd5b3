"""Tests of the benchmark of servers: its figures and targets, and a run. No time is asserted."""

from __future__ import annotations

import json

import pytest

from benchmarks import servers
from benchmarks.peers.kinds import Continued
from benchmarks.serve.figures import ENGINE, SERVER, Case, Measured, Round, show

CASE = Case(requests=2, prompt=4, new=2, prefix=8)
OPENVINO, LLAMA = "OpenVINO GenAI", "llama.cpp server"


def continued(first: float, last: float) -> list[Continued]:
    """Two requests of two tokens each, which end at the same time."""
    return [([1, 2], [first, last]), ([3, 4], [first / 2, last])]


def measured(**results: list[Continued]) -> Measured:
    names = {"engine": ENGINE, "server": SERVER, "openvino": OPENVINO, "llama": LLAMA}
    figures = Measured("a model", 2, CASE)
    figures.rounds = [Round(1e10, {names[name]: answers for name, answers in results.items()})] * 2
    figures.gaps, figures.allowed = dict.fromkeys(names.values(), 0.01), 0.05
    return figures


def test_figures() -> None:
    figures = measured(engine=continued(1.0, 4.0))
    assert figures.per_s(ENGINE) == 1.0  # four tokens in four seconds
    assert (figures.first(ENGINE, 0), figures.first(ENGINE, 95)) == (0.5, 1.0)
    assert figures.right(ENGINE) and figures.targets() == [] and figures.ok


def test_targets() -> None:
    figures = measured(
        engine=continued(1.0, 4.0), server=continued(1.0, 5.0), openvino=continued(0.9, 4.0),
        llama=continued(3.0, 6.5),
    )  # fmt: skip
    met = {target.target: target.ok for target in figures.targets()}
    assert met == {
        f"{SERVER} over {LLAMA}, at least 1.2": True,
        f"first token of {SERVER} over {LLAMA}, 95 %, at most 1": True,
        f"{ENGINE} over {OPENVINO}, at least 1.0": True,
        f"first token of {ENGINE} over {OPENVINO}, 95 %, at most 1": False,
    }
    assert not figures.ok


def test_targets_are_medians_of_the_ratios_of_rounds() -> None:
    """A machine that becomes slower changes no ratio."""
    figures = measured(engine=continued(1.0, 4.0), openvino=continued(1.0, 5.0))
    slow = measured(engine=continued(3.0, 12.0), openvino=continued(3.0, 15.0))
    figures.rounds = [figures.rounds[0], *slow.rounds]
    speed, first = figures.targets()
    assert (speed.ratios, first.ratios) == (pytest.approx([1.25] * 3), (1.0, 1.0, 1.0))


def test_a_side_that_is_wrong_or_short_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    figures = measured(engine=continued(1.0, 4.0), openvino=[([1], [1.0]), ([3, 4], [1.0, 4.0])])
    assert not figures.right(OPENVINO) and not figures.ok  # a token is missing
    figures.gaps[ENGINE] = 0.06
    assert not figures.right(ENGINE)
    show(figures)
    assert capsys.readouterr().out.count("WRONG") == 2


def test_the_gain_of_a_prefix() -> None:
    figures = measured(engine=continued(1.0, 4.0))
    figures.prefixes[ENGINE] = ([6.0, 5.0, 4.0], [1.0, 1.25, 2.0])
    assert figures.prefix_gain(ENGINE) == 4.0
    (gain,) = figures.targets()
    assert (gain.ratio, gain.ok) == (4.0, False)


def test_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Both sides give the same tokens, which are right; a peer that is missing is named."""
    options = ["--model", "tiny-qwen3", "--requests", "3", "--prompt", "9", "--new", "4"]
    options += ["--prefix", "0", "--rounds", "1", "--threads", "1", "--json"]
    servers.main([*options, "--sides", "tpcompile", "vLLM"])
    report = json.loads(capsys.readouterr().out)
    assert set(report["sides"]) == {ENGINE, SERVER}
    assert all(side["ok"] for side in report["sides"].values())
    assert list(report["not_installed"]) == ["vLLM"] and report["failed"] == {}
    results = report["rounds"][0]["results"]
    assert results[ENGINE][0][0] == results[SERVER][0][0]  # the same tokens
    assert len(results[ENGINE]) == 3 and {len(answer[0]) for answer in results[ENGINE]} == {4}
