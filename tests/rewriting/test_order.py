"""Passes that violate the declared order are refused, also if they come from a plugin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from torch import fx

from tests.captures import captured_once
from tpcompile.errors import UsageError
from tpcompile.options import passes_for
from tpcompile.passes import Pass, default_pipeline, parse_pipeline, run_passes
from tpcompile.rewriting.order import check_order
from tpcompile.rewriting.rewrite import Report


@dataclass(frozen=True)
class Own:
    """A pass of a plugin that matches nothing, so nothing else would notice its order."""

    name: ClassVar[str] = "own"
    after: ClassVar[tuple[str, ...]] = ("canonicalize", "raise-norm")
    before: ClassVar[tuple[str, ...]] = ("fuse-add-norm",)

    def apply(self, gm: fx.GraphModule) -> Report:
        return Report()


def passes(text: str) -> list[Pass]:
    return [Own() if name == "own" else parse_pipeline(name)[0] for name in text.split(",")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("own,canonicalize", "own must run after canonicalize"),
        ("own,raise-norm,canonicalize", "own must run after canonicalize and raise-norm"),
        ("canonicalize,raise-norm,fuse-add-norm,own", "own must run before fuse-add-norm"),
        ("fuse-add-norm,own,canonicalize", "own must run after canonicalize and before fuse-add"),
    ],
)
def test_another_order_than_declared_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}.*Found {text}"):
        run_passes(captured_once("preset:tiny-qwen3").graph, passes(text))


@dataclass(frozen=True)
class Misspelt(Own):
    """A pass whose place names no pass."""

    name: ClassVar[str] = "misspelt"
    after: ClassVar[tuple[str, ...]] = ("canonicalise",)


@pytest.mark.parametrize("pipeline", [[Misspelt()], [*default_pipeline(2), Misspelt()]])
def test_a_place_after_no_pass_is_refused(pipeline: list[Pass]) -> None:
    with pytest.raises(
        UsageError, match=r"after 'canonicalise', which is not a pass.*canonicalize"
    ):
        passes_for(pipeline, 2)


@pytest.mark.parametrize(
    "text",
    [
        "own",
        "own,fuse-add-norm",
        "canonicalize,raise-norm,own,fuse-add-norm",
        "canonicalize,raise-norm,own,canonicalize,fuse-add-norm,own",  # repeated passes
    ],
)
def test_passes_may_be_left_out_and_run_again(text: str) -> None:
    check_order(passes(text))


def test_passes_that_are_done_count() -> None:
    check_order(passes("own"), done=passes("canonicalize"))
    with pytest.raises(UsageError, match="own must run before fuse-add-norm"):
        check_order(passes("own"), done=passes("fuse-add-norm"))
