"""What is needed to run the native tests with AVX-512 on CPUs without it."""

from __future__ import annotations

import re
from pathlib import Path

from tests.emulated import changed_sources, emulated_names, header


def test_each_intrinsic_of_the_kernels_has_a_function(tmp_path: Path) -> None:
    sources = changed_sources(tmp_path / "sources")
    texts = [file.read_text(encoding="utf-8") for file in sources.iterdir()]
    used = set(re.findall(r"\b_mm512_(\w+)", "\n".join(texts)))
    assert len(used) > 40
    assert used <= emulated_names()
    assert all(f"#define _mm512_{name} " in header() for name in used)
