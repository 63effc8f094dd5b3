"""What all tests of the runtime share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _captured_once(captured_once: None) -> None:
    """Capture is not the subject here."""
