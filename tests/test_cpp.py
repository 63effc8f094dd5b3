"""Building libraries: what is refused, and what is built again."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tpcompile import cpp
from tpcompile.cpp import CppLibrary
from tpcompile.errors import UnsupportedError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def library(tmp_path: Path) -> CppLibrary:
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "own.cpp").write_text('#include "number.h"\nextern "C" int own() { return kOwn; }\n')
    return CppLibrary(
        name="library of this test",
        sources=sources,
        units={"own": ()},
        headers={"number.h": "constexpr int kOwn = 7;\n"},
        instead="or do without",
        takes="a moment",
    )


def _compiler(path: Path, script: str) -> str:
    path.write_text(f"#!{sys.executable}\nimport sys\n{script}\n")
    path.chmod(0o755)
    return str(path)


def _only(monkeypatch: pytest.MonkeyPatch, compiler: str | None) -> None:
    monkeypatch.setattr(cpp.shutil, "which", lambda name: compiler)


def test_a_library_is_built_once(
    home: Path,
    library: CppLibrary,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handle: ctypes.CDLL = library.load()
    assert handle.own() == 7
    message = "tpcompile: building the library of this test, which takes a moment\n"
    assert capsys.readouterr().err == message
    monkeypatch.setattr(CppLibrary, "_build", None)
    assert library.load(library.built()).own() == 7


def test_no_compiler(library: CppLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    _only(monkeypatch, None)
    message = r"The library of this test needs a C\+\+ compiler.*Install .* compiler, or do without"
    with pytest.raises(UnsupportedError, match=message):
        library.load()


@pytest.mark.parametrize(
    "script",
    [
        'sys.exit(0) if "--version" in sys.argv else sys.exit("no space for templates")',
        'sys.exit("no space for templates")',
    ],
    ids=["compiles nothing", "has no version"],
)
def test_a_compiler_that_fails(
    script: str, home: Path, library: CppLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    _only(monkeypatch, _compiler(home / "broken", script))
    with pytest.raises(UnsupportedError, match=r"cannot be built.*no space for templates"):
        library.load()
    assert {path.name for path in (home / ".cache/tpcompile/native").iterdir()} <= {"lock"}


def test_a_compiler_that_cannot_be_run(
    home: Path, library: CppLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    _only(monkeypatch, str(home / "missing"))
    with pytest.raises(UnsupportedError, match=r"cannot be built.*missing"):
        library.load()


def test_a_file_that_is_no_library(
    home: Path, library: CppLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """
if "-o" in sys.argv:
    open(sys.argv[sys.argv.index("-o") + 1], "w").close()
"""
    _only(monkeypatch, _compiler(home / "empty", script))
    with pytest.raises(UnsupportedError, match=r"cannot be loaded.*or do without"):
        library.load()


def test_a_cache_that_cannot_be_made(home: Path, library: CppLibrary) -> None:
    (home / ".cache").write_text("a file")
    with pytest.raises(UnsupportedError, match=r"cannot be created at .*native"):
        library.load()


def test_a_user_without_a_home(library: CppLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(UnsupportedError, match=r"no directory for its cache.*home directory"):
        library.load()


def test_a_cache_that_others_may_write_to(home: Path, library: CppLibrary) -> None:
    directory = home / ".cache/tpcompile/native"
    directory.mkdir(parents=True)
    directory.chmod(0o777)
    with pytest.raises(UnsupportedError, match=r"writable by its owner only.*drwxrwxrwx"):
        library.load()


def test_the_key_depends_on_sources_flags_and_compiler(
    tmp_path: Path, library: CppLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilers = [_compiler(tmp_path / name, f'print("version {name}")') for name in ("a", "b")]
    keys = {library.key(compiler) for compiler in compilers}
    keys.add(replace(library, units={"own": ("-g",)}).key(compilers[0]))
    keys.add(replace(library, headers={"number.h": ""}).key(compilers[0]))
    (library.sources / "own.cpp").write_text("")
    keys.add(library.key(compilers[0]))
    monkeypatch.setattr(cpp, "FLAGS", (*cpp.FLAGS, "-g"))
    keys.add(library.key(compilers[0]))
    assert len(keys) == 6


def _truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-4096])


def _zeroed(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def _emptied(file: Path) -> None:
    file.write_bytes(b"")


def _one_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [_truncated, _zeroed, _emptied, _one_bit, Path.unlink])
@pytest.mark.parametrize("suffix", [".so", ".sha256"])
def test_a_damaged_library_is_built_again(
    damage: Callable[[Path], None], suffix: str, home: Path, library: CppLibrary
) -> None:
    file = library.built()
    right = file.read_bytes()
    damage(file.with_suffix(suffix))
    assert library.built() == file and file.read_bytes() == right
    assert library.load().own() == 7


def _failing(monkeypatch: pytest.MonkeyPatch, where: object, name: str, number: int) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(where, name, fail)


FULL = (errno.ENOSPC, "No space left on device.*Free space on the disk, or do without")
OPEN = (errno.EMFILE, "Too many open files.*Close files.*or do without")


@pytest.mark.parametrize(("number", "message"), [FULL, OPEN], ids=["full disk", "open files"])
@pytest.mark.parametrize(
    ("where", "name"),
    [(cpp.subprocess, "run"), (Path, "write_text"), (Path, "replace"), (Path, "open")],
    ids=["start of the compiler", "headers", "the end", "the lock"],
)
def test_a_failure_of_the_machine_is_not_one_of_the_compiler(
    where: object,
    name: str,
    number: int,
    message: str,
    home: Path,
    library: CppLibrary,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _failing(monkeypatch, where, name, number)
    with pytest.raises(UnsupportedError, match=f"(?s)cannot be built.*{message}") as caught:
        library.load()
    assert "Install" not in str(caught.value)
    monkeypatch.undo()
    monkeypatch.setattr(Path, "home", lambda: home)
    assert library.load().own() == 7


@pytest.mark.parametrize(("number", "message"), [FULL, OPEN], ids=["full disk", "open files"])
def test_a_compiler_that_says_what_failed(
    number: int, message: str, home: Path, library: CppLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"""
if "--version" not in sys.argv:
    sys.exit("a.s: fatal error: cannot write: {os.strerror(number)}")
"""
    _only(monkeypatch, _compiler(home / "full", script))
    with pytest.raises(UnsupportedError, match=f"(?s)cannot be built.*{message}") as caught:
        library.load()
    assert "Install" not in str(caught.value)


def test_a_library_that_the_machine_cannot_load(
    home: Path, library: CppLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file: Too many open files")

    monkeypatch.setattr(cpp.ctypes, "CDLL", fail)
    with pytest.raises(UnsupportedError, match=r"cannot be loaded.*Close files") as caught:
        library.load()
    assert "Install" not in str(caught.value)


def test_a_compiler_that_hangs(
    home: Path, library: CppLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cpp._LONGEST_S >= 600, "a slow machine needs minutes"
    monkeypatch.setattr(cpp, "_LONGEST_S", 0.5)
    script = 'import time\ntime.sleep(600 if "--version" not in sys.argv else 0)'
    _only(monkeypatch, _compiler(home / "slow", script))
    with pytest.raises(UnsupportedError, match=r"no end within 0\.5 s.*compiler works, or do with"):
        library.load()


BUILD = """
import sys
from pathlib import Path
from tpcompile.cpp import CppLibrary
print(CppLibrary(name="library", sources=Path(sys.argv[1]), units={"own": ()}).load().own())
"""


def test_processes_that_build_at_once_build_once(tmp_path: Path, library: CppLibrary) -> None:
    real = shutil.which("c++")
    assert real is not None
    (library.sources / "number.h").write_text("constexpr int kOwn = 7;\n")
    script = f"""
import os, time
with open({str(tmp_path / "runs")!r}, "a") as runs:
    runs.write(" ".join(sys.argv[1:]) + "\\n")
time.sleep(0.5)
os.execv({real!r}, [{real!r}, *sys.argv[1:]])
"""
    _compiler(tmp_path / "c++", script)
    environment = {**os.environ, "HOME": str(tmp_path)}
    environment["PATH"] = f"{tmp_path}{os.pathsep}{environment['PATH']}"
    command = [sys.executable, "-c", BUILD, str(library.sources)]
    builds = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    assert [build.communicate(timeout=300)[0] for build in builds] == ["7\n", "7\n"]
    runs = (tmp_path / "runs").read_text().splitlines()
    assert sorted(run == "--version" for run in runs) == [False, False, True, True]


@pytest.mark.skipif(shutil.which("clang++") is None, reason="needs clang++")
def test_clang_builds_the_libraries(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tpcompile.backends.native.build import whole
    from tpcompile.comm.shared import LIBRARY

    _only(monkeypatch, shutil.which("clang++"))
    assert whole().load().tpc_path(0) and LIBRARY.load().tpc_sum


def test_the_cache_of_the_xdg_specification(
    home: Path, library: CppLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XDG_CACHE_HOME is where the user keeps caches, unless it is empty or relative."""
    for value, directory in (
        (str(tmp_path / "caches"), tmp_path / "caches"),
        ("", home / ".cache"),
        ("caches", home / ".cache"),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert library.built().parent == directory / "tpcompile" / "native"
