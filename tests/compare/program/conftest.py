"""Presets are captured once for all of these tests: capture is not their subject."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _captured_once(captured_once: None) -> None:
    """Every case prepares the same few models."""
