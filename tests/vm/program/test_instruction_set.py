"""Each kind of instruction has one spelling, in snake case, wherever a user reads it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tpcompile.vm.groups  # noqa: F401  (registers the instructions)
from tpcompile.errors import UsageError
from tpcompile.vm.program.instruction_set import INSTRUCTIONS, InstructionSet

ROOT = Path(__file__).parents[3]
OWN = [kind for kind in INSTRUCTIONS.values() if kind.opcode < 256]
CLASSES = re.compile(rf"\b({'|'.join(kind.__name__ for kind in OWN)})\b")


def test_a_name_is_that_of_its_class() -> None:
    for kind in OWN:
        assert kind.name == re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()


@pytest.mark.parametrize("name", ["AllReduce", "all-reduce", "all__reduce", "2_sums", ""])
def test_other_spellings_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="must be in snake case"):
        InstructionSet().add(name, OWN[0])


def test_no_message_names_the_class() -> None:
    """String constants become output. Docstrings and lists of exports do not."""
    mentions = [
        f"{path.relative_to(ROOT)}:{line}: {text!r}"
        for path in sorted((ROOT / "tpcompile").rglob("*.py"))
        for line, text in texts(path)
        if CLASSES.search(text)
    ]
    assert mentions == []


def test_no_page_names_the_class() -> None:
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]
    assert [page.name for page in pages if CLASSES.search(page.read_text(encoding="utf-8"))] == []


def texts(path: Path) -> Iterator[tuple[int, str]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    exports = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)
    ]
    quiet = {id(inner) for node in exports for inner in ast.walk(node)}
    quiet |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in quiet:
            yield node.lineno, node.value
