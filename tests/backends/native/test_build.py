"""Tests of the library build: compiler errors, cache validation and rebuilds."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tpcompile.backends.native import build
from tpcompile.errors import UnsupportedError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide an empty build cache."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    return tmp_path


def _compiler(path: Path, script: str) -> str:
    path.write_text(f"#!{sys.executable}\nimport sys\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with pytest.raises(UnsupportedError, match=r'needs a C\+\+ compiler.*backend="torch"'):
        build.library.__wrapped__()


def test_a_compiler_that_fails(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = 'sys.exit(0) if "--version" in sys.argv else sys.exit("no space for templates")'
    broken = _compiler(tmp_path / "broken", script)
    monkeypatch.setattr(build.shutil, "which", lambda name: broken)
    with pytest.raises(UnsupportedError, match=r"cannot be built.*no space for templates"):
        build.library.__wrapped__()
    assert "building the native backend" in capsys.readouterr().err
    left = [path.name for path in (home / ".cache/tpcompile/native").iterdir()]
    assert left == ["lock"]


def test_a_cache_that_cannot_be_made(home: Path) -> None:
    (home / ".cache").write_text("a file")
    with pytest.raises(UnsupportedError, match=r"cannot be created at .*native"):
        build.library.__wrapped__()


def test_a_cache_that_others_may_write_to(home: Path) -> None:
    directory = home / ".cache/tpcompile/native"
    directory.mkdir(parents=True)
    directory.chmod(0o777)
    with pytest.raises(UnsupportedError, match=r"writable by its owner only.*drwxrwxrwx"):
        build.library.__wrapped__()


def test_the_key_depends_on_sources_flags_and_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilers = [_compiler(tmp_path / name, f'print("version {name}")') for name in ("a", "b")]
    keys = {build._key(compiler) for compiler in compilers}
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-g"))
    keys.add(build._key(compilers[0]))
    monkeypatch.setattr(build.abi, "c_header", lambda: "")
    keys.add(build._key(compilers[0]))
    assert len(keys) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", build._units())
def test_paths_share_no_code(name: str, tmp_path: Path) -> None:
    """No unit defines weak symbols.

    The linker keeps any one copy of a weak symbol, possibly one compiled for another CPU.
    """
    if name == "interpreter" or shutil.which("nm") is None:
        pytest.skip("the interpreter has no target flags" if name == "interpreter" else "no nm")
    compiler = shutil.which("c++")
    assert compiler is not None
    (tmp_path / "tpc_abi.h").write_text(build.abi.c_header())
    build._compile(compiler, tmp_path, name, build._units()[name])
    made = ["nm", "--defined-only", str(tmp_path / f"{name}.o")]
    symbols = subprocess.run(made, capture_output=True, text=True, check=True).stdout
    assert [line for line in symbols.splitlines() if line.split()[1] in "WV"] == []
