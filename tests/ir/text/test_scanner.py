"""The scanner cites the line and the column of what it cannot read."""

from __future__ import annotations

import re

import pytest

from tpcompile.errors import UsageError
from tpcompile.ir.text.scanner import Scanner
from tpcompile.ir.text.words import one_line, quoted

HOSTILE = [
    'a"b', "a\\b", "two words", "line\nbreak", "\x00\x1b[31m", "\u2028", "<script>", "é", "permute",
    "pad", "",
]  # fmt: skip


@pytest.mark.parametrize("name", ["model.layers.0", "a-b/c@d_1", *HOSTILE])
def test_names_come_back(name: str) -> None:
    written = quoted(name)
    assert written.isprintable() and "\n" not in written
    line = Scanner(1, f"{written} rest")
    assert (line.name("a name"), line.rest()) == (name, " rest")


def test_plain_names_have_no_quotes() -> None:
    assert quoted("model.layers.0") == "model.layers.0"
    assert quoted("pad") == '"pad"'


@pytest.mark.parametrize("text", ["layers.0 / file.py:3", *HOSTILE, " space", '"quoted"'])
def test_text_at_the_end_of_a_line(text: str) -> None:
    written = one_line(text)
    assert "\n" not in written
    line = Scanner(1, written)
    assert (line.name("text") if written != text else line.rest()) == text


def test_errors_cite_the_place() -> None:
    line = Scanner(7, "    abc 12x")
    assert line.indent == 4 and line.accept("abc ")
    assert line.integer("a number") == 12
    with pytest.raises(UsageError) as error:
        line.expect(", ")
    assert (error.value.where, error.value.got) == ("line 7, column 11", "'x'")
    line.rest()
    with pytest.raises(UsageError, match="the end of the line"):
        line.integer("a number")


def test_long_lines_are_cut_in_errors() -> None:
    error = Scanner(1, "y" * 500).refusal("No")
    assert error.got == repr("y" * 60 + "…")


@pytest.mark.parametrize("text", ["01", "-1", "+1", "x", "٣"])
def test_integers_are_plain(text: str) -> None:
    with pytest.raises(UsageError):
        Scanner(1, f"{text})").integers(")", "a number")


@pytest.mark.parametrize("text", ["9" * 11, "1" + "0" * 5000])
def test_numbers_have_a_limit(text: str) -> None:
    with pytest.raises(UsageError, match="at most 10 digits"):
        Scanner(1, text).integer("a number")


@pytest.mark.parametrize("text", ['"open', r'"\x"', '"tab\there"', r'"\u12"'])
def test_quotes_that_are_not_valid(text: str) -> None:
    with pytest.raises(UsageError, match=re.compile("not valid", re.IGNORECASE)):
        Scanner(1, text).name("a name")


def test_lists_of_integers() -> None:
    assert Scanner(1, "1, 2, 3)").integers(")", "a number") == (1, 2, 3)
    assert Scanner(1, ")").integers(")", "a number") == ()
    for text in ("1,2)", "1, )", "1", ", 1)"):
        with pytest.raises(UsageError):
            Scanner(1, text).integers(")", "a number")
