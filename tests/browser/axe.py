"""Accessibility problems of a page, as axe-core finds them."""

from __future__ import annotations

import pytest

from tests.browser.reader import Reader


def problems(reader: Reader, options: dict[str, object]) -> list[str]:
    """Return the serious and critical problems. Skip the test if axe-core is not installed."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    report = axe.Axe().run(reader.page, options={"resultTypes": ["violations"], **options})
    return [
        f"{violation['id']}: {violation['help']}: {node['html'][:120]}"
        for violation in report.response["violations"]
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"][:3]
    ]
