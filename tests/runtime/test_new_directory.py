"""New directories appear atomically, also through symbolic links."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpcompile.errors import UsageError
from tpcompile.runtime.new_directory import check_new_directory, filled_directory, new_directory


def test_the_target_of_a_link(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("target")
    with new_directory(link) as directory:
        (directory / "a.txt").write_text("a")
    assert link.readlink() == Path("target")
    assert sorted(tmp_path.rglob("*")) == [link, tmp_path / "target", tmp_path / "target" / "a.txt"]


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(UsageError, match=r"a cannot be written.*symbolic links"):
        check_new_directory(tmp_path / "a")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_cycle_of_links_is_refused_before_files_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with (
        pytest.raises(UsageError, match=r"a cannot be written"),
        filled_directory(tmp_path / "a", lambda name: False),
    ):
        raise AssertionError("must not be entered")
