"""Targets: machines as the scheduler sees them, as data."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from tpcompile.errors import UsageError, did_you_mean

INT32_MAX = 2**31 - 1
"""The most of any count but workers: executors read int32."""
MOST_WORKERS = 65_536
"""Of a rank."""


@dataclass(frozen=True)
class Target:
    """Workers that share a memory; every rank has a machine of its own like this."""

    name: str
    workers: int
    bytes_per_us: float
    """What all workers together get out of memory."""
    instruction_us: float
    """What an instruction costs beside the bytes it reads: dispatch, and its vectors."""
    exchange_us: float
    """Until what one rank has written can be read by another."""
    link_bytes_per_us: float
    """What a rank gets from another."""
    grain: int
    """The rows that a worker takes at once: blocks of rows are a multiple of it."""
    spans: int
    """Into how many spans attention is split."""

    @property
    def worker_bytes_per_us(self) -> float:
        """One worker's share, with all of them at work."""
        return self.bytes_per_us / self.workers


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        # bandwidths as the vendors print them, per microsecond; a worker is a core or an SM
        Target("cpu", 2, 60_000, 2.0, 2.0, 10_000, 16, 1),
        Target("a100", 108, 2_039_000, 1.5, 3.0, 300_000, 16, 8),
        Target("h100", 132, 3_350_000, 1.2, 2.5, 450_000, 16, 8),
        Target("h200", 132, 4_800_000, 1.2, 2.5, 450_000, 16, 8),
        Target("b200", 148, 8_000_000, 1.0, 2.0, 900_000, 16, 8),
    )
}


def target_of(name: str, workers: int | None = None) -> Target:
    """A target by its name, or of a JSON file with its fields, with `workers` if they are given.

    A CPU has a worker for each core unless told otherwise.
    """
    found = _from_file(Path(name)) if name.endswith(".json") else TARGETS.get(name)
    if found is None:
        raise UsageError(
            f"There is no target {name!r}",
            hint=f"{did_you_mean(name, TARGETS)} Or name a JSON file with the fields of one",
        )
    if workers is None and name == "cpu":
        workers = os.cpu_count()
    if workers is not None:
        found = replace(found, workers=workers)
    _check(found)
    return found


def _from_file(path: Path) -> Target:
    try:
        given: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"There is no file {path}") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"The target {path} cannot be read", got=str(error)) from error
    known = [field.name for field in fields(Target)]
    if not isinstance(given, dict) or set(given) - set(known):
        strange = ", ".join(sorted(set(given) - set(known))) if isinstance(given, dict) else given
        raise UsageError(
            f"The target {path} is not understood", got=str(strange), expected=", ".join(known)
        )
    return Target(**{**asdict(TARGETS["cpu"]), "name": path.stem, **given})


def _check(target: Target) -> None:
    for name, value in asdict(target).items():
        if name == "name":
            if not isinstance(value, str):
                raise UsageError(f"A target with name={value!r}", expected="text")
            continue
        whole = name in ("workers", "grain", "spans")
        number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not number or not 0 < value <= sys.float_info.max:  # neither NaN nor infinity
            raise UsageError(
                f"A target with {name}={value!r}",
                expected="a whole number, 1 or more" if whole else "a finite number above 0",
            )
        most = MOST_WORKERS if name == "workers" else INT32_MAX
        if whole and value > most:
            raise UsageError(f"A target with {name}={value:,}", expected=f"at most {most:,}")
