"""Garbage collection is paused while a graph is built, and resumed afterwards, also on errors."""

from __future__ import annotations

import gc

import pytest

from tpcompile.errors import UsageError
from tpcompile.frontend import capture
from tpcompile.pause import paused_collector


def test_it_is_off_inside_and_on_behind() -> None:
    assert gc.isenabled()
    with paused_collector():
        assert not gc.isenabled()
        with paused_collector():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_stays_off_where_it_was_off() -> None:
    gc.disable()
    try:
        with paused_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_it_is_on_again_when_a_capture_fails() -> None:
    with pytest.raises(UsageError):
        capture("preset:nothing")
    assert gc.isenabled()


def test_what_it_created_is_old_behind() -> None:
    """The next collection of young objects does not traverse it."""
    with paused_collector():
        created = [[number] for number in range(10_000)]
    young = {id(one) for one in (*gc.get_objects(generation=0), *gc.get_objects(generation=1))}
    assert not young.intersection(map(id, created))


def test_what_the_user_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        with paused_collector():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
