"""Fixtures shared by all tests of GGUF files."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _captured_once(captured_once: None) -> None:
    """Share captures between tests, which capture themselves where it is the subject."""
