"""Directories that ask for code of their own to be run, and leave a mark if it is."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest


def add_code(directory: Path, file: str, **entries: Any) -> Path:
    """Name code in a JSON file of the directory; the path of the mark that it leaves."""
    mark = directory.parent / f"{directory.name}-was-run"
    code = f"open({str(mark)!r}, 'w').close()\n"
    (directory / "evil.py").write_text(code)
    generate = directory / "custom_generate" / "generate.py"
    generate.parent.mkdir(exist_ok=True)
    generate.write_text(f"{code}\ndef generate(model, **options):\n    return None\n")
    values: dict[str, Any] = {}
    if (directory / file).exists():
        values = json.loads((directory / file).read_text())
    (directory / file).write_text(json.dumps(values | {"auto_map": entries}))
    return mark


def answer_yes(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Let stdin say yes to every question; what is left of it shows that nothing was asked."""
    said = io.StringIO("y\n" * 5)
    monkeypatch.setattr("sys.stdin", said)
    return said
