"""Accessibility problems of a page, as axe-core finds them."""

from __future__ import annotations

import pytest

from tests.browser.reader import Reader


def problems(reader: Reader, options: dict[str, object]) -> list[str]:
    """Return the serious and critical problems. Skip the test if axe-core is not installed."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    found = axe.Axe().run(reader.page, options={"resultTypes": ["violations"], **options})
    return [
        f"{one['id']}: {one['help']}: {node['html'][:120]}"
        for one in found.response["violations"]
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"][:3]
    ]
