"""AVX-512 for the native tests on CPUs without it.

    python -m pytest -p tests.emulated tests/backends/native -k avx512_bf16

The kernels of the path `avx512_bf16` are built with a function for each intrinsic, see `avx512.h`.
The build takes minutes, and is in the cache afterwards. Processes that tests start are as usual.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tpcompile.backends.native import build
from tpcompile.cpp import CppLibrary

PATH = "avx512_bf16"
HEADER = Path(__file__).parent / "backends" / "native" / "avx512.h"
FEATURES = ("F", "BW", "VL", "DQ", "VNNI", "BF16")
EDITS = {
    "paths.cpp": (
        'return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16");',
        "return true;",
    ),
    "integers.h": ('__asm__("" : "+v"(value));', "(void)value;"),
    "numbers.h": ('__asm__ volatile("" : "+v"(value));', "(void)value;"),
}
"""Changes of sources: the path runs on any CPU, and no register of 64 bytes is asked for."""
_sources = build.sources


def emulated_names() -> set[str]:
    """Return the intrinsics that have a function, without `_mm512_`."""
    return set(re.findall(r"EMULATED [\w ]+ emulated_(\w+)\(", HEADER.read_text(encoding="utf-8")))


def header() -> str:
    """Return the functions, and macros that put them in place of the intrinsics."""
    macros = (
        f"#undef _mm512_{name}\n#define _mm512_{name} emulated_{name}"
        for name in sorted(emulated_names())
    )
    features = (f"#define __AVX512{feature}__ 1" for feature in FEATURES)
    return "\n".join([HEADER.read_text(encoding="utf-8"), *macros, *features, ""])


def changed_sources(directory: Path) -> Path:
    """Copy the sources to a new directory, and change them."""
    shutil.copytree(_sources().sources, directory)
    for name, (old, new) in EDITS.items():
        text = (directory / name).read_text(encoding="utf-8")
        assert text.count(old) == 1, name
        (directory / name).write_text(text.replace(old, new), encoding="utf-8")
    return directory


@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as directory:
        changed = changed_sources(Path(directory) / "sources")

        def sources(path: str | None = None, dtype: torch.dtype | None = None) -> CppLibrary:
            """Return the description of a library: of the emulated path, or of all paths."""
            library = _sources(path, dtype)
            if path not in (None, PATH):
                return library
            library = replace(library, sources=changed)
            if path is None:
                return library
            flags = ("-O1", "-w", *_sources("avx2").units["avx2"], "-include", "emulated.h")
            return replace(
                library,
                units={
                    name: (*flags, *(flag for flag in unit_flags if flag.startswith("-D")))
                    for name, unit_flags in library.units.items()
                },
                headers={**library.headers, "emulated.h": header()},
            )

        build.sources = sources
        build._OTHER_DTYPES = {}  # those of a path that is not emulated
        return (yield)
