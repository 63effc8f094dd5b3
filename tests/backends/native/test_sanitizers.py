"""Dumped programs under the sanitizers of the compiler: no race, no access beside memory.

A sanitized library cannot be loaded into Python, so a driver in C++ runs the dumps. `dump.py`
writes what the library computes here, with which the driver compares.
"""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.backends.native.dump import write_dump
from tests.backends.programs import FLOATS8, KINDS, ROUNDS, memory_of
from tests.backends.reference.stepping import INT4
from tpcompile.backends.native import Native, build
from tpcompile.backends.native.build import paths
from tpcompile.compare.rows import TOLERANCES
from tpcompile.passes.cache_kv import CacheKv

SANITIZERS = {
    "thread": ("-fsanitize=thread",),
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
}
LAUNCHES, STEPS = 3, 2
DRIVER = Path(__file__).parent / "driver.cpp"
_DTYPES = (torch.float32, torch.bfloat16)
_THREADS = ((1, 2), (2, 1), (1, 8), (2, 4))
"""Ranks and workers of each, for 2 and for 8 threads."""
CASES = [
    *(
        (model, None, dtype, tp, workers, batch)
        for model in ("tiny-qwen2", "tiny-qwen3")
        for tp, workers in _THREADS
        for batch in (1, 4, 17)
        for dtype in _DTYPES
    ),
    *(
        ("tiny-qwen3", few_bits, dtype, tp, workers, batch)
        for few_bits in ("int4:32", "int4:64", "int8:32", "int8:row", "int4:32:a8", "int8:64:a8")
        for tp, workers in (_THREADS[1], _THREADS[-1])
        for batch in (1, 5, 17)
        for dtype in _DTYPES
    ),
    *(
        ("tiny-qwen3", kind, dtype, *_THREADS[-1], batch)
        for kind in (*KINDS, *FLOATS8)
        for batch in (1, 5, 17)
        for dtype in _DTYPES
    ),
    *((INT4, None, torch.float32, tp, workers, 4) for tp, workers in _THREADS),
]
"""Programs with weights of 16, 8 and 4 bits, and of the latter with offsets."""
_ROUNDED = [
    (model, None, dtype, *_THREADS[-1], batch, "int8")
    for model in ("tiny-qwen2", "tiny-qwen3")
    for batch in (1, 5)
    for dtype in _DTYPES
]
"""Programs with a cache in int8."""


def _compiler() -> str:
    found = shutil.which("c++")
    if found is None:
        pytest.skip("no C++ compiler")
    return found


def _sources(own: Path) -> Path:
    """Copy the sources of the library and the driver."""
    found = own / "sources"
    shutil.copytree(build.whole().sources, found)
    shutil.copy(DRIVER, found)
    return found


def _built(own: Path, sources: Path, sanitizer: str) -> Path:
    """Build the driver with the sources of the library."""
    compiler, flags = _compiler(), SANITIZERS[sanitizer]
    every = ("-O1", "-g", "-fno-omit-frame-pointer", *flags)
    units = {
        name: (*target, *every) for name, target in {**build.whole().units, "driver": ()}.items()
    }
    library = replace(build.whole(), sources=sources, units=units)
    library.write_headers(own)
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(partial(library.compile_unit, compiler, own), units))
    made = own / "driver"
    subprocess.run([compiler, *flags, "-pthread", "-o", str(made), *objects], check=True)
    return made


def _dumped(
    directory: Path,
    path: str,
    model: str,
    few_bits: str | None,
    dtype: torch.dtype,
    tp: int,
    workers: int,
    batch: int,
    kv: str = CacheKv.kv,
) -> str:
    """Write what a vector path computes here."""
    kind = str(dtype).removeprefix("torch.")
    file = directory / f"{path}-{model}-{few_bits}-{kind}-{tp}-{workers}-{batch}-{kv}"
    memory = memory_of(model, dtype, tp, batch, workers=workers, few_bits=few_bits, kv=kv)
    native = Native(memory, path)
    tables = torch.arange(4 * batch).view(batch, 4)
    native.place(torch.arange(batch) * 7 + 3, torch.ones(batch, dtype=torch.int64), tables)
    # The driver is compiled with other flags, and what is rounded to int8 may then differ by one.
    rounds = (few_bits or "").endswith(ROUNDS) or kv != CacheKv.kv
    tolerance = TOLERANCES[torch.bfloat16 if rounds else dtype]
    write_dump(file, native, launches=LAUNCHES, steps=STEPS, tolerance=tolerance)
    native.close()
    return str(file)


def _run(driver: Path, path: str, dumps: list[str]) -> subprocess.CompletedProcess[str]:
    command = [str(driver), path, *dumps]
    return subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_no_report(sanitizer: str, tmp_path: Path) -> None:
    driver = _built(tmp_path, _sources(tmp_path), sanitizer)
    for path in paths():
        dumps = [_dumped(tmp_path, path, *case) for case in (*CASES, *_ROUNDED)]
        done = _run(driver, path, dumps)
        wrong = [line for line in done.stdout.splitlines() if not line.endswith(": right")]
        assert (wrong, done.returncode, done.stderr[:6000]) == ([], 0, "")
        assert done.stdout.count(": right") == 2 * len(dumps)


MISTAKES = {
    "a signal that orders nothing": (
        "thread",
        "interpreter.cpp",
        ("1, __ATOMIC_SEQ_CST", "1, __ATOMIC_RELAXED"),
        "data race",
    ),
    "a row too many": (
        "address",
        "dots.h",
        ("for (; row < rows; ++row)", "for (; row <= rows; ++row)"),
        "AddressSanitizer",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported(mistake: str, tmp_path: Path) -> None:
    sanitizer, name, (right, wrong), report = MISTAKES[mistake]
    sources = _sources(tmp_path)
    text = (sources / name).read_text()
    assert right in text
    (sources / name).write_text(text.replace(right, wrong))
    driver = _built(tmp_path, sources, sanitizer)
    dump = _dumped(tmp_path, "portable", "tiny-qwen3", None, torch.float32, 2, 4, 4)
    done = _run(driver, "portable", [dump])
    assert done.returncode != 0
    assert report in done.stderr
