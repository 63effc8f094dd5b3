"""Installed plugins are found by their entry points, and broken ones are named."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tpcompile import plugins
from tpcompile.errors import UsageError
from tpcompile.plugins import load_plugins


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provide an empty directory on the import path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    load_plugins.cache_clear()
    yield tmp_path
    load_plugins.cache_clear()
    sys.modules.pop("tpc_tried", None)


def _package(directory: Path, source: str) -> None:
    (directory / "tpc_tried.py").write_text(source)
    about = directory / "tpc_tried-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tpc-tried\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{plugins.GROUP}]\ntried = tpc_tried\n")


def test_a_plugin_is_imported_once(install: Path) -> None:
    _package(install, "import sys\nsys.modules.setdefault('tpc_count', []).append(1)\n")
    try:
        assert "tried" in load_plugins()
        assert load_plugins() is load_plugins()
        assert sys.modules["tpc_count"] == [1]
    finally:
        sys.modules.pop("tpc_count", None)


def test_one_that_cannot_be_imported_is_named(install: Path) -> None:
    _package(install, "1 / 0\n")
    with pytest.raises(UsageError, match=r"plugin tried cannot be imported.*tpc_tried.*division"):
        load_plugins()


def test_one_that_registers_something_wrong_is_named(install: Path) -> None:
    _package(install, "from tpcompile.errors import UsageError\nraise UsageError('It is wrong')\n")
    with pytest.raises(UsageError, match=r"It is wrong\. At the plugin tried \(tpc_tried\)"):
        load_plugins()
