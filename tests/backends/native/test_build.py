"""Tests of the parts of the native library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tpcompile.backends.native import build
from tpcompile.ir.format import Format
from tpcompile.vm.groups.head import NormLmHead


@pytest.mark.slow
@pytest.mark.parametrize("name", build.whole().units)
def test_paths_share_no_code(name: str, tmp_path: Path) -> None:
    """The linker may keep any of several weak copies, also one with instructions of another CPU."""
    if name in ("interpreter", "checks") or shutil.which("nm") is None:
        pytest.skip("no nm" if shutil.which("nm") is None else f"{name} has no target flags")
    compiler = shutil.which("c++")
    assert compiler is not None
    build.whole().write_headers(tmp_path)
    object_file = build.whole().compile_unit(compiler, tmp_path, name)
    listed = ["nm", "--defined-only", str(object_file)]
    symbols = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    weak = [line.split()[2] for line in symbols.splitlines() if line.split()[1] in "WV"]
    assert [name for name in weak if not name.startswith("DW.ref.")] == []  # those are no code


@pytest.mark.slow
@pytest.mark.parametrize("name", build.whole().units)
def test_no_warnings(name: str, tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    assert compiler is not None
    units = {name: (*build.whole().units[name], "-Wextra", "-Werror", "-fsyntax-only")}
    build.whole().write_headers(tmp_path)
    replace(build.whole(), units=units).compile_unit(compiler, tmp_path, name)


BUILT = """
import torch
from tpcompile.backends.native import Native
from tpcompile.backends.native.build import kernels, paths
from tpcompile.cpp import _user_cache
built = _user_cache() / "tpcompile" / "native"
count = lambda: len(list(built.glob("*.so")))
found = paths()
print(found, count())
kernels(found[0], torch.float16)
print(count())
"""


@pytest.mark.slow
def test_only_the_path_and_dtype_that_run_are_built(tmp_path: Path) -> None:
    """The names of all paths need no kernels; kernels need none of another path or dtype."""
    environment = {**os.environ, "HOME": str(tmp_path)}
    command = [sys.executable, "-c", BUILT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{build.paths()} 1\n2\n"
    assert done.stderr.count("building the native backend") == 1


def test_kernels_are_those_of_one_dtype() -> None:
    path, dtypes = build.paths()[0], (torch.bfloat16, torch.float32)
    supported = {
        (built, values): build.has_kernel(path, built, NormLmHead.opcode, *[Format.of(values)] * 4)
        for built in dtypes
        for values in dtypes
    }
    assert supported == {key: key[0] == key[1] for key in supported}
    assert not build.has_kernel(path, torch.int32, NormLmHead.opcode)


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(set(build.known()) - set(build.paths())))
def test_the_kernels_of_another_cpu_are_refused(path: str) -> None:
    library = build.library()
    assert library.tpc_open(None, build.kernels(path, torch.bfloat16)) is None
    assert library.tpc_refusal() == b"the path does not run here"
