"""The benchmark of sums: it runs all sides on real ranks, and a slow side is a failure."""

from __future__ import annotations

import json

import pytest

from benchmarks.sum import GLOO, SHARED, SIDES, SOCKETS, Measured, main


def _measured(gloo: float, shared: float, ranks: int = 2, same_bits: bool = True) -> Measured:
    sides = {GLOO: [gloo], SOCKETS: [gloo], SHARED: [shared, shared, 10 * shared]}
    return Measured(ranks, {4096: sides}, same_bits)


@pytest.mark.parametrize(
    ("measured", "ok"),
    [
        (_measured(20.0, 1.0), True),
        (_measured(19.9, 1.0), False),
        (_measured(19.9, 1.0, ranks=3), True),
        (_measured(20.0, 1.0, same_bits=False), False),
    ],
)
def test_a_missed_target_is_a_failure(measured: Measured, ok: bool) -> None:
    assert measured.ok is ok


def test_measures_all_sides(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--json", "--ranks", "3", "--sizes", "4096", "300000", "--turns", "1"])
    report = json.loads(capsys.readouterr().out)
    assert report["same_bits"] and report["ok"] and status == 0
    assert [size["bytes"] for size in report["seconds"]] == [4096, 300000]
    for size in report["seconds"]:
        assert list(size["sides"]) == list(SIDES)
        assert all(0 < side["min"] <= side["median"] for side in size["sides"].values())


def test_one_rank_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--ranks", "1"])
    assert ended.value.code == 2
    assert "--ranks must be at least 2" in capsys.readouterr().err
