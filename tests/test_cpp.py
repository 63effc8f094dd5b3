"""Building libraries: what is refused, and what is built again."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tpcompile import cpp
from tpcompile.cpp import CppLibrary
from tpcompile.errors import UnsupportedError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
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
    found: ctypes.CDLL = library.load()
    assert found.own() == 7
    said = "tpcompile: building the library of this test, which takes a moment\n"
    assert capsys.readouterr().err == said
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
