"""Dumped programs under the sanitizers of the compiler: no race, no access beside memory.

A sanitized library cannot be loaded into Python, so a driver in C++ runs the dumps. `dump.py`
writes what the library computes here, with which the driver compares.
"""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.backends.native.dump import write_dump
from tests.backends.programs import FLOATS8, KINDS, ROUNDS, memory_of
from tests.backends.reference.step_models import INT4
from tpcompile.backends.native import Native, build
from tpcompile.backends.native.build import paths
from tpcompile.compare.rows import TOLERANCES
from tpcompile.passes.cache_kv import CacheKv

SANITIZERS = {
    "thread": ("-O1", "-fsanitize=thread"),
    "address": (
        "-O0",
        "-fsanitize=address,undefined,float-cast-overflow",
        "-fno-sanitize-recover=all",
    ),
}
"""The flags of each. With these optimizations, builds and runs take the least time together."""
_EVERY = ("-g1", "-fno-omit-frame-pointer", "-DTPC_ALWAYS=")
"""Functions of kernels are not inlined: the checks of all copies take compilers a quarter of an
hour."""
LAUNCHES, STEPS = 2, 2
DRIVER = Path(__file__).parent / "driver.cpp"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_THREADS = ((1, 2), (2, 1), (1, 8), (2, 4))
"""Ranks and workers of each, for 2 and for 8 threads."""
_FEW_BITS = ("int4:32", "int4:64", "int8:32", "int8:row", "int4:32:a8", "int8:64:a8")
_SIZES = (
    (torch.float32, 1),
    (torch.float32, 5),
    (torch.bfloat16, 1),
    (torch.bfloat16, 17),
    (torch.float16, 5),
)
"""The dtypes and batches of weights in few bits. Both dtypes of 16 bits have the same products, and
fp32 has no panels."""
CASES = [
    *(
        (model, None, dtype, tp, workers, batch)
        for model in ("tiny-qwen2", "tiny-qwen3")
        for tp, workers in _THREADS
        for batch in (1, 4, 17)
        for dtype in _DTYPES
    ),
    *(
        ("tiny-qwen3", kind, dtype, *_THREADS[-1], batch)
        for kind in (*_FEW_BITS, *KINDS, *FLOATS8)
        for dtype, batch in _SIZES
    ),
    *((INT4, None, torch.float32, tp, workers, 4) for tp, workers in _THREADS),
    *(
        (model, None, dtype, *_THREADS[-1], batch, "int8")
        for model in ("tiny-qwen2", "tiny-qwen3")
        for batch in (1, 5)
        for dtype in _DTYPES
    ),
    *(
        ("tiny-qwen3", None, dtype, *_THREADS[-1], batch, CacheKv.kv, 4007)
        for batch in (4, 12)
        for dtype in _DTYPES
    ),
    *(
        ("tiny-qwen3", kind, torch.bfloat16, *_THREADS[-1], batch, CacheKv.kv, 512)
        for kind in (*_FEW_BITS, *KINDS, *FLOATS8)
        for batch in (1, 5)
    ),
]
"""Programs with weights of 32 and 16 bits, of few bits, of 4 bits with offsets, with a cache in
int8, and with rows of so many columns that kernels multiply some of them at a time."""


def _compiler() -> str:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    return compiler


def _sources(directory: Path) -> Path:
    """Copy the sources of the library and the driver."""
    sources = directory / "sources"
    shutil.copytree(build.sources().sources, sources)
    shutil.copy(DRIVER, sources)
    return sources


def _built(directory: Path, sources: Path, sanitizer: str, path: str) -> Path:
    """Build the driver with the sources of the library and the kernels of a vector path."""
    compiler, flags = _compiler(), SANITIZERS[sanitizer]
    own_flags = {
        **build.sources().units,
        **build.sources(path).units,
        "driver": (f"-DTPC_KERNELS=tpc_{path}",),
    }
    units = {name: (*unit_flags, *_EVERY, *flags) for name, unit_flags in own_flags.items()}
    library = replace(build.sources(), sources=sources, units=units)
    library.write_headers(directory)
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(partial(library.compile_unit, compiler, directory), units))
    driver = directory / "driver"
    subprocess.run([compiler, *flags, "-pthread", "-o", str(driver), *objects], check=True)
    return driver


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
    wide: int = 0,
) -> str:
    """Write what a vector path computes here."""
    kind = str(dtype).removeprefix("torch.")
    file = directory / f"{path}-{model}-{few_bits}-{kind}-{tp}-{workers}-{batch}-{kv}-{wide}"
    memory = memory_of(
        model, dtype, tp, batch, workers=workers, wide=wide, few_bits=few_bits, kv=kv
    )
    native = Native(memory, path)
    tables = torch.arange(4 * batch).view(batch, 4)
    native.place(torch.arange(batch) * 7 + 3, torch.ones(batch, dtype=torch.int64), tables)
    # The driver is compiled with other flags, and what is rounded to int8 may then differ by one.
    rounds = (few_bits or "").endswith(ROUNDS) or kv != CacheKv.kv
    tolerance = TOLERANCES[torch.bfloat16 if rounds else dtype]
    write_dump(file, native, launches=LAUNCHES, steps=STEPS, tolerance=tolerance)
    native.close()
    return str(file)


def _run(driver: Path, dumps: list[str]) -> subprocess.CompletedProcess[str]:
    command = [str(driver), *dumps]
    return subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", SANITIZERS)
@pytest.mark.parametrize("path", paths())
def test_no_report(path: str, sanitizer: str, tmp_path: Path) -> None:
    driver = _built(tmp_path, _sources(tmp_path), sanitizer, path)
    dumps = [_dumped(tmp_path, path, *case) for case in CASES]
    done = _run(driver, dumps)
    wrong = [line for line in done.stdout.splitlines() if not line.endswith(": right")]
    assert (wrong, done.returncode, done.stderr[:6000]) == ([], 0, "")
    assert done.stdout.count(": right") == 2 * len(dumps)


@dataclass(frozen=True)
class Mistake:
    """A mistake in a source file, a program that meets it, and what is reported."""

    sanitizer: str
    path: str
    source: str
    right: str
    wrong: str
    weights: str | None
    report: str


MISTAKES = {
    "a signal that orders nothing": Mistake(
        "thread",
        "portable",
        "interpreter.cpp",
        "1, __ATOMIC_SEQ_CST",
        "1, __ATOMIC_RELAXED",
        None,
        "data race",
    ),
    "a scale too many": Mistake(
        "address",
        paths()[0],
        "grouped.h",
        "- group >= kRegister)",
        "- group >= kRegister - 1)",
        "Q4_K",
        "AddressSanitizer",
    ),
    "a shift of all bits": Mistake(
        "address",
        paths()[0],
        "grouped_panels.h",
        "lanes |= 1u << own % kLanes;",
        "lanes |= 1u << (own % kLanes + 32);",
        "Q4_K",
        "runtime error: shift exponent 32 is too large",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported(name: str, tmp_path: Path) -> None:
    mistake = MISTAKES[name]
    sources = _sources(tmp_path)
    text = (sources / mistake.source).read_text()
    assert mistake.right in text
    (sources / mistake.source).write_text(text.replace(mistake.right, mistake.wrong))
    driver = _built(tmp_path, sources, mistake.sanitizer, mistake.path)
    case = ("tiny-qwen3", mistake.weights, torch.bfloat16, *_THREADS[-1], 5)
    dump = _dumped(tmp_path, mistake.path, *case)
    done = _run(driver, [dump])
    assert done.returncode != 0
    assert mistake.report in done.stderr
