"""Runs in other environments first verify that the environment is in effect."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.environments import ENVIRONMENTS, main


def test_a_setting_that_is_not_in_effect_ends_the_run() -> None:
    """oneDNN uses another instruction set than the environment says: the run ends."""
    other = replace(ENVIRONMENTS["avx2"], variables={"ONEDNN_MAX_CPU_ISA": "SSE41"})
    with pytest.raises(SystemExit, match="must show"):
        other.check()


def test_an_unknown_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["avx3"])
    assert "avx3 must be one of avx2, " in capsys.readouterr().err
