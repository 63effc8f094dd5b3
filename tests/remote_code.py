"""Create model directories whose remote code leaves a mark if it runs."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest


def add_code(directory: Path, file: str, **entries: Any) -> Path:
    """Add remote code to a JSON file of the directory; return the path of its mark."""
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
    """Answer yes to all prompts on stdin; unread answers show that no prompt appeared."""
    stdin = io.StringIO("y\n" * 5)
    monkeypatch.setattr("sys.stdin", stdin)
    return stdin
