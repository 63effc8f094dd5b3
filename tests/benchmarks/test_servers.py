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
    found = Measured("a model", 2, CASE)
    found.rounds = [Round(1e10, {names[name]: one for name, one in results.items()})] * 2
    found.gaps, found.allowed = dict.fromkeys(names.values(), 0.01), 0.05
    return found


def test_figures() -> None:
    found = measured(engine=continued(1.0, 4.0))
    assert found.per_s(ENGINE) == 1.0  # four tokens in four seconds
    assert (found.first(ENGINE, 0), found.first(ENGINE, 95)) == (0.5, 1.0)
    assert found.right(ENGINE) and found.targets() == [] and found.ok


def test_targets() -> None:
    found = measured(
        engine=continued(1.0, 4.0), server=continued(1.0, 5.0), openvino=continued(0.9, 4.0),
        llama=continued(3.0, 6.5),
    )  # fmt: skip
    met = {one.target: one.ok for one in found.targets()}
    assert met == {
        f"{SERVER} over {LLAMA}, at least 1.2": True,
        f"first token of {SERVER} over {LLAMA}, 95 %, at most 1": True,
        f"{ENGINE} over {OPENVINO}, at least 1.0": True,
        f"first token of {ENGINE} over {OPENVINO}, 95 %, at most 1": False,
    }
    assert not found.ok


def test_targets_are_medians_of_the_ratios_of_rounds() -> None:
    """A machine that becomes slower changes no ratio."""
    found = measured(engine=continued(1.0, 4.0), openvino=continued(1.0, 5.0))
    slow = measured(engine=continued(3.0, 12.0), openvino=continued(3.0, 15.0))
    found.rounds = [found.rounds[0], *slow.rounds]
    speed, first = found.targets()
    assert (speed.ratios, first.ratios) == (pytest.approx([1.25] * 3), (1.0, 1.0, 1.0))


def test_a_side_that_is_wrong_or_short_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(engine=continued(1.0, 4.0), openvino=[([1], [1.0]), ([3, 4], [1.0, 4.0])])
    assert not found.right(OPENVINO) and not found.ok  # a token is missing
    found.gaps[ENGINE] = 0.06
    assert not found.right(ENGINE)
    show(found)
    assert capsys.readouterr().out.count("WRONG") == 2


def test_the_gain_of_a_prefix() -> None:
    found = measured(engine=continued(1.0, 4.0))
    found.prefixes[ENGINE] = ([6.0, 5.0, 4.0], [1.0, 1.25, 2.0])
    assert found.prefix_gain(ENGINE) == 4.0
    (gain,) = found.targets()
    assert (gain.ratio, gain.ok) == (4.0, False)


def test_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Both sides give the same tokens, which are right; a peer that is missing is named."""
    options = ["--model", "tiny-qwen3", "--requests", "3", "--prompt", "9", "--new", "4"]
    options += ["--prefix", "0", "--rounds", "1", "--threads", "1", "--json"]
    servers.main([*options, "--sides", "tpcompile", "vLLM"])
    found = json.loads(capsys.readouterr().out)
    assert set(found["sides"]) == {ENGINE, SERVER}
    assert all(one["ok"] for one in found["sides"].values())
    assert list(found["not_installed"]) == ["vLLM"] and found["failed"] == {}
    results = found["rounds"][0]["results"]
    assert results[ENGINE][0][0] == results[SERVER][0][0]  # the same tokens
    assert len(results[ENGINE]) == 3 and {len(one[0]) for one in results[ENGINE]} == {4}
