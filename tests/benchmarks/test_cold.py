"""The cold benchmark compares within rounds, counts a failed command as one, and names extras."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

import pytest

from benchmarks import cold
from benchmarks.cold import Measured, Spent


def _measured(
    plan: Sequence[float] = (6.0,) * 3,
    other: Sequence[float] | None = None,
    loaded: Sequence[str] = ("networkx", "torch.export._trace"),
) -> Measured:
    walls = {"imports": (5.0, 6.0, 5.0), "plan": plan, "schedule": (12.0,) * 3}
    walls |= {} if other is None else {"other schedule": other}
    sides = {name: [Spent(wall, wall) for wall in seconds] for name, seconds in walls.items()}
    return Measured(sides, {"imports": ("torch", "scipy"), "plan": loaded, "schedule": ()})


@pytest.mark.parametrize(
    ("measured", "ok"),
    [
        (_measured(), True),
        (_measured(plan=(6.5, 7.5, 6.5)), True),
        (_measured(plan=(6.6, 7.6, 6.6)), False),
        (_measured(plan=(6.5, 7.5, 60.0)), True),
        (_measured(other=(20.0,) * 3), True),
        (_measured(other=(19.0,) * 3), False),
        (_measured(loaded=("scipy.optimize",)), False),
    ],
)
def test_a_missed_target_is_missed(measured: Measured, ok: bool) -> None:
    assert measured.ok is ok


def test_what_commands_import_in_addition() -> None:
    assert _measured(loaded=("rich", "torch")).beyond == {"plan": ["rich"], "schedule": []}


def test_extras_are_packages() -> None:
    assert _measured(loaded=("scipy.a", "scipy.b", "rich")).extras() == ["scipy"]


def test_a_process_takes_time() -> None:
    spent = cold.spent([sys.executable, "-c", "sum(range(10**6))"])
    assert spent.wall > 0 and spent.cpu > 0
    with pytest.raises(subprocess.CalledProcessError):
        cold.spent([sys.executable, "-c", "raise SystemExit(3)"])


def test_modules_are_those_of_the_statement() -> None:
    work = "import importlib, sys; importlib.import_module(sys.argv[1]); print('not a module')"
    assert set(cold.modules_after(work, ["colorsys"])) > {"colorsys", "importlib"}
    assert "colorsys" not in cold.modules_after("pass")


def test_rounds_alternate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[Sequence[str]] = []

    def spent(argv: Sequence[str]) -> Spent:
        ran.append(argv)
        return Spent(1.0, 1.0)

    monkeypatch.setattr(cold, "spent", spent)
    monkeypatch.setattr(
        cold, "modules_after", lambda *work: ["rich"] + ["rich.table"] * len(work[1:])
    )
    assert cold.main(["--rounds", "2", "--against", "other-python", "--json"]) == 1
    assert [argv[0] == "other-python" for argv in ran[:2]] == [False, True]  # to compile both
    rounds = ran[2:]
    assert len(rounds) == 10 and rounds[:5] == rounds[:4:-1]
    assert [argv[0] == "other-python" for argv in rounds[:5]] == [False, False, False, True, True]
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["of_other"], report["over_imports_s"]) == (False, 1.0, 0.0)
    assert report["beyond"]["plan"] == ["rich.table"]
    cold.main(["--rounds", "1"])
    assert "plan over imports: 0.00 s" in capsys.readouterr().out
