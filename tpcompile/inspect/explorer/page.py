"""The page: one HTML file with its data, its styles and its scripts, which needs no network.

Data are compressed and encoded, and the scripts put them into the page as text. So no name in a
model can become markup. A content security policy allows only the page's own scripts.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

_SCRIPTS = (
    "vendor/dagre.min.js",
    "core.js",
    "stages.js",
    "expressions.js",
    "details.js",
    "overview.js",
    "pipeline.js",
    "graph.js",
    "ranks.js",
    "schedule_data.js",
    "schedule_sums.js",
    "timeline_pixels.js",
    "timeline_marks.js",
    "timeline.js",
    "schedule_details.js",
    "schedule_overview.js",
    "schedule_view.js",
    "comparison.js",
    "start.js",
)
_STYLES = ("page.css", "schedule.css", "narrow.css")
_LEVEL = 6


def page_html(title: str, data: Mapping[str, Any], blobs: Mapping[str, bytes]) -> str:
    """Return the page. `data` is decoded at once, `blobs` when a view needs them."""
    whole = {"page": json.dumps(data, separators=(",", ":")).encode(), **blobs}
    licence = _static("vendor/dagre.LICENSE.txt").replace("*/", "")
    scripts = f"/* dagre\n{licence}*/\n" + "\n".join(_static(name) for name in _SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(scripts.encode()).digest()).decode()
    values = {
        "TITLE": html.escape(title),
        "POLICY": f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'",
        "STYLES": "\n".join(_static(name) for name in _STYLES),
        "BLOBS": "\n".join(_blob(name, content) for name, content in whole.items()),
        "SCRIPTS": scripts,
    }
    parts = _static("page.html").split("@@")
    return "".join(values[part] if place % 2 else part for place, part in enumerate(parts))


def _static(name: str) -> str:
    return files(__package__).joinpath("static", *name.split("/")).read_text(encoding="utf-8")


def _blob(name: str, content: bytes) -> str:
    packed = gzip.compress(content, _LEVEL, mtime=0)
    encoded = base64.b64encode(packed).decode()
    return f'<script type="application/octet-stream" id="blob-{name}">{encoded}</script>'
