"""Weights that were read and laid out anew leave no holes behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import contextlib, sys, torch
from tpcompile.runtime.memory import returned_at_once

def anonymous():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Anonymous"))

torch.ones(30 << 18)  # freed: glibc now keeps pieces of up to 30 MB
with returned_at_once() if sys.argv[1] == "inside" else contextlib.nullcontext():
    kept = [torch.ones(2 << 20) for _ in range(20)]  # 8 MB each
    before = anonymous()
    del kept[::2]
    print((before - anonymous()) // 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux tells by pages")
def test_what_is_freed_inside_goes_back_to_the_system() -> None:
    returned = {}
    for where in ("inside", "outside"):
        command = [sys.executable, "-c", _SCRIPT, where]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        returned[where] = int(done.stdout)
    assert returned["inside"] >= 75
    assert returned["outside"] <= 10


_AFTERWARDS = """
import resource, torch
from tpcompile.runtime.memory import returned_at_once

with returned_at_once():
    kept = [torch.ones(2 << 20) for _ in range(20)]
    del kept[::2]
for _ in range(5):
    torch.ones(3 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    torch.ones(3 << 20)  # 12 MB, filled and freed
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux tells by pages")
def test_afterwards_memory_is_used_again_without_being_asked_for_anew() -> None:
    """It depends on the layout of the heap, so it is tried several times."""
    for _ in range(4):
        command = [sys.executable, "-c", _AFTERWARDS]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert int(done.stdout) < 10_000, "50 fills of fresh pages would be 150,000 faults"
