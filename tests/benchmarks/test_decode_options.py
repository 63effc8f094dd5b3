"""Options of the decode benchmark."""

from __future__ import annotations

import sys

import pytest

from benchmarks.decode_measured import LLAMA, OPENVINO
from benchmarks.decode_options import parse


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--sides", "nobody"], "--sides matches no side"),
        (["--steps", "0"], "must be at least 1"),
        (["--dtypes", "int8"], "invalid choice: 'int8'"),
        (["--at-once", "1"], "--at-once must be at least 2"),
        (["--from", "/no/such/file"], "must hold results of --json: FileNotFoundError"),
        (["--peer-python", "eager=python"], "must start with one of"),
        (["--peer-python", "llama.cpp=/no/such/file"], "is not an executable file"),
    ],
)
def test_bad_options(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(options, None)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_peers_run_under_their_own_interpreters() -> None:
    given = [f"llama.cpp={sys.executable}", f"openvino-export={sys.executable}"]
    options = parse([word for own in given for word in ("--peer-python", own)], None)
    chosen = {spec.name: spec for spec in options.chosen}
    assert len(chosen) == 9
    assert chosen[LLAMA].python == chosen[OPENVINO].export_python == sys.executable
    assert chosen[OPENVINO].python == sys.executable and not chosen[LLAMA].export_python
