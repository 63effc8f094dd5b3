"""Directories with one file a stage, and files."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

import pytest

from tpcompile.errors import UsageError
from tpcompile.inspect.files import check_file, write_file, write_stages

STAGES = [("capture", "a\n"), ("raise-norm", "b → c\n")]


def test_a_new_directory(tmp_path: Path) -> None:
    written = write_stages(tmp_path / "deep" / "d", STAGES, "txt")
    assert [path.name for path in written] == ["00-capture.txt", "01-raise-norm.txt"]
    assert [path.read_text(encoding="utf-8") for path in written] == ["a\n", "b → c\n"]
    assert sorted(tmp_path.rglob("*")) == [
        tmp_path / "deep",
        tmp_path / "deep" / "d",
        *written,
    ]


def test_an_earlier_dump_is_replaced(tmp_path: Path) -> None:
    write_stages(tmp_path, [*STAGES, ("fuse-qkv", "d\n")], "txt")
    written = write_stages(tmp_path, STAGES, "json")
    assert sorted(tmp_path.iterdir()) == written


def test_other_things_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"holds other things.*notes\.txt"):
        write_stages(tmp_path, STAGES, "txt")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="is not a directory"):
        write_stages(tmp_path / "file", STAGES, "txt")
    with pytest.raises(UsageError, match="cannot be written"):
        write_stages(tmp_path / "file" / "d", STAGES, "txt")


def test_nothing_is_left_when_writing_fails(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        write_stages(tmp_path / "d", [*STAGES, ("no/name", "x")], "txt")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    write_file(path, lambda file: file.write("first → "))
    assert path.read_text(encoding="utf-8") == "first → "

    def fails(file: TextIO) -> None:
        file.write("second")
        raise KeyError

    with pytest.raises(KeyError):
        write_file(path, fails)
    assert path.read_text(encoding="utf-8") == "first → "
    assert list(tmp_path.iterdir()) == [path]


def test_places_for_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a directory"):
        check_file(tmp_path)
    with pytest.raises(UsageError, match=r"There is no directory .*none for a\.svg"):
        write_file(tmp_path / "none" / "a.svg", lambda file: None)
    with pytest.raises(UsageError, match="cannot be written"):
        write_file(tmp_path / ("long" * 100), lambda file: None)
    assert list(tmp_path.iterdir()) == []
