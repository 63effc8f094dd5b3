"""Tests of writing directories with one file per stage, and of writing single files."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
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
    with pytest.raises(UsageError, match=r"files that are not from a dump.*notes\.txt"):
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


def test_a_file_that_is_replaced_stays_as_private_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    path.write_text("first")
    path.chmod(0o640)
    before = path.stat().st_ino
    write_file(path, lambda file: file.write("second"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert path.stat().st_ino != before  # replaced atomically by another file


def test_a_fifo_stays_and_its_reader_gets_the_text(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    link = tmp_path / "link"
    link.symlink_to("fifo")
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    for path in (fifo, link):
        write_file(path, lambda file: file.write("a → b"))
        assert os.read(reader, 100).decode() == "a → b"
    os.close(reader)
    assert fifo.is_fifo()
    assert link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [fifo, link]


def _device(tmp_path: Path, name: str, minor: int) -> Path:
    """Return a device that the test may overwrite: as root, a new node."""
    if os.geteuid() != 0:
        return Path("/dev") / name
    node = tmp_path / name
    try:
        os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(1, minor))
        os.close(os.open(node, os.O_WRONLY))
    except OSError as error:
        pytest.skip(f"no device can be made here: {error}")
    return node


def test_a_device_stays(tmp_path: Path) -> None:
    null = _device(tmp_path, "null", 3)
    write_file(null, lambda file: file.write("text"))
    assert null.is_char_device()


def test_a_full_device_is_a_plain_error_and_stays(tmp_path: Path) -> None:
    full = _device(tmp_path, "full", 7)
    with pytest.raises(UsageError, match=r"full cannot be written\. Found .*No space left"):
        write_file(full, lambda file: file.write("text"))
    assert full.is_char_device()


def test_links_stay_and_their_targets_are_written(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "elsewhere" / "a.svg"
    link, far = tmp_path / "link", tmp_path / "far"
    link.symlink_to(target)
    far.symlink_to("link")
    for path, text in ((link, "dangling"), (link, "there"), (far, "through two")):
        write_file(path, lambda file, text=text: file.write(text))  # type: ignore[misc]
        assert target.read_text() == text
    assert link.readlink() == target
    assert far.readlink() == Path("link")
    assert sorted(tmp_path.rglob("*")) == [target.parent, target, far, link]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs Linux's /proc")
def test_a_link_to_a_descriptor_is_written_in_place(tmp_path: Path) -> None:
    """A link to a descriptor, such as /dev/stdout, is written in place; a pipe has no path."""
    read, write = os.pipe()
    link = tmp_path / "stdout"
    link.symlink_to(f"/proc/self/fd/{write}")
    write_file(link, lambda file: file.write("text"))
    os.close(write)
    with open(read) as file:
        assert file.read() == "text"
    assert list(tmp_path.iterdir()) == [link]


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "c").symlink_to("none/c.svg")
    for write in (check_file, lambda path: write_file(path, lambda file: None)):
        with pytest.raises(UsageError, match=r"a cannot be written.*symbolic links"):
            write(tmp_path / "a")
        with pytest.raises(UsageError, match=r"There is no directory .*none for c\.svg"):
            write(tmp_path / "c")
    with pytest.raises(UsageError, match=r"a cannot be written.*symbolic links"):
        write_stages(tmp_path / "a", STAGES, "txt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


def test_a_dump_goes_to_the_target_of_a_link(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("dump")
    for stages in (STAGES, STAGES[:1]):  # dangling, then existing
        written = write_stages(link, stages, "txt")
        assert link.readlink() == Path("dump")
        assert sorted((tmp_path / "dump").iterdir()) == [
            tmp_path / "dump" / path.name for path in written
        ]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("notes", path)])
def test_a_dump_holds_regular_files_alone(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "00-capture.txt")
    before = (tmp_path / "00-capture.txt").lstat()
    with pytest.raises(UsageError, match=r"files that are not from a dump.*00-capture\.txt"):
        write_stages(tmp_path, STAGES, "txt")
    assert (tmp_path / "00-capture.txt").lstat() == before
