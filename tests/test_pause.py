"""Garbage collection is paused while a graph is built, and resumed afterwards, also on errors."""

from __future__ import annotations

import gc
import weakref

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


class _Cycle:
    """An object that refers to itself, as models and graphs do."""

    def __init__(self) -> None:
        self.own = self


def test_what_it_created_is_young_behind() -> None:
    """So an abandoned model is freed by the next collection of young objects."""
    with paused_collector():
        gone = weakref.ref(_Cycle())
    assert gone() is not None
    gc.collect(0)
    assert gone() is None
