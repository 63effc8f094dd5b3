"""Fixtures shared by all tests of the runtime."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _captured_once(captured_once: None) -> None:
    """Share captures between tests; capture is not the subject here."""
