"""Weights that are read and copied to another layout leave no holes in memory.

Expected values are measured in the same process, since page sizes and the sizes in which the
system provides memory differ between machines.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_HEAD = """
import mmap, resource, torch
from tpcompile.runtime.memory import returned_at_once

def anonymous():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Anonymous"))

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
"""
_GLIBC = pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists() or sys.platform != "linux",
    reason="needs Linux and glibc",
)


def _found(script: str) -> list[int]:
    command = [sys.executable, "-c", _HEAD + script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [int(word) for word in done.stdout.split()]


_RETURNED = """
torch.ones(30 << 18)  # freed: glibc now keeps pieces of up to 30 MB

def returned():
    tensors = [torch.ones(2 << 20) for _ in range(20)]  # 8 MB each
    before = anonymous()
    del tensors[::2]
    return before - anonymous()

with returned_at_once():
    inside = returned()
outside = returned()
private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
mapped = [mmap.mmap(-1, 8 << 20, private) for _ in range(10)]  # what certainly goes back
for mapping in mapped:
    mapping.write(bytes(8 << 20))
before = anonymous()
for mapping in mapped:
    mapping.close()
print(inside, outside, before - anonymous())
"""


@_GLIBC
def test_what_is_freed_inside_goes_back_to_the_system() -> None:
    """Memory freed inside the heap returns to the system; without advice most of it stays."""
    inside, outside, all_of_it = _found(_RETURNED)
    assert inside > 0.75 * all_of_it
    assert outside < 0.5 * all_of_it


_AFTERWARDS = """
with returned_at_once():
    tensors = [torch.ones(2 << 20) for _ in range(20)]
    del tensors[::2]

def fills(room):
    before = faults()
    for _ in range(50):
        room()  # 12 MB, filled and freed
    return faults() - before

ones = bytes(12 << 20)

def fresh():
    with mmap.mmap(-1, 12 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        pages.write(ones)

for _ in range(5):
    torch.ones(3 << 20)
print(fills(lambda: torch.ones(3 << 20)), fills(fresh))
"""


@_GLIBC
def test_afterwards_memory_is_used_again_without_being_asked_for_anew() -> None:
    """Freed memory is reused without page faults; retried, as it depends on the heap layout."""
    for _ in range(4):
        again, fresh = _found(_AFTERWARDS)
        assert again < fresh / 5
