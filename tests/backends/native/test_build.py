"""Tests of the parts of the native library."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tpcompile.backends.native import build


@pytest.mark.slow
@pytest.mark.parametrize("name", build.sources().units)
def test_paths_share_no_code(name: str, tmp_path: Path) -> None:
    """The linker may keep any of several weak copies, also one with instructions of another CPU."""
    if name == "interpreter" or shutil.which("nm") is None:
        pytest.skip("the interpreter has no target flags" if name == "interpreter" else "no nm")
    compiler = shutil.which("c++")
    assert compiler is not None
    build.sources().write_headers(tmp_path)
    made = build.sources().compile_unit(compiler, tmp_path, name)
    listed = ["nm", "--defined-only", str(made)]
    symbols = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    weak = [line.split()[2] for line in symbols.splitlines() if line.split()[1] in "WV"]
    assert [name for name in weak if not name.startswith("DW.ref.")] == []  # those are no code


@pytest.mark.slow
@pytest.mark.parametrize("name", build.sources().units)
def test_no_warnings(name: str, tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    assert compiler is not None
    units = {name: (*build.sources().units[name], "-Wextra", "-Werror", "-fsyntax-only")}
    build.sources().write_headers(tmp_path)
    replace(build.sources(), units=units).compile_unit(compiler, tmp_path, name)
