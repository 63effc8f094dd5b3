"""Targets: machines as the scheduler sees them, as data."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from tpcompile.cores import threads_of
from tpcompile.errors import UsageError, did_you_mean
from tpcompile.registry import Registry

INT32_MAX = 2**31 - 1
"""The limit of every count except workers, because executors read int32."""
MOST_WORKERS = 65_536
"""The limit of workers per rank."""


@dataclass(frozen=True)
class Target:
    """A machine whose workers share a memory. Every rank has its own machine of this kind."""

    name: str
    workers: int
    bytes_per_us: float
    """The memory bandwidth of all workers together."""
    instruction_us: float
    """The fixed cost of an instruction: dispatch, and loads other than weights and cache."""
    exchange_us: float
    """The delay until another rank can read a written value."""
    link_bytes_per_us: float
    """The bandwidth of reads from another rank."""
    grain: int
    """The granularity of work in rows. Blocks of rows are multiples of it."""
    spans: int
    """The number of spans into which attention is split, if sequences can be long enough."""
    macs_per_us: float = 100_000
    """The multiply-accumulates of all workers together, outside of matrix units."""
    value_us: float = 0.0
    """The time of one worker per value that an instruction norms, converts or activates."""
    alone_bytes_per_us: float = 0.0
    """The bandwidth of one worker while no other one loads; 0 if others do not change it."""
    matrix_macs_per_us: float = 0.0
    """The multiply-accumulates of all matrix units, which multiply weights with values of 16 bits;
    0 if there are none."""
    blocks_per_worker: int = 1
    """The blocks of a phase per worker. If several, workers share a queue, so a worker that loses
    its core to another program delays the others by a block and not by its share of the phase."""
    span_tokens: int = 1
    """The tokens that a worker attends to at a time. A shorter span takes as long."""

    @property
    def worker_bytes_per_us(self) -> float:
        """The bandwidth of one worker when all are busy."""
        return self.bytes_per_us / self.workers

    @property
    def most_bytes_per_us(self) -> float:
        """The bandwidth of one worker when few are busy."""
        return max(self.alone_bytes_per_us, self.worker_bytes_per_us)

    @property
    def worker_macs_per_us(self) -> float:
        """The multiply-accumulates of one worker, outside of matrix units."""
        return self.macs_per_us / self.workers

    @property
    def worker_matrix_macs_per_us(self) -> float:
        """The multiply-accumulates of one worker, in matrix units if there are any."""
        return max(self.matrix_macs_per_us, self.macs_per_us) / self.workers


TARGETS: Registry[Target] = Registry("target")


def add_target(target: Target) -> Target:
    """Register a target under its name, and return it."""
    _check(target)
    TARGETS.add(target.name, target)
    return target


def target_of(name: str | Target, workers: int | None = None, ranks: int = 1) -> Target:
    """Return the target of this name, in any case, or JSON file. `workers` overrides its workers.

    `cpu` has one worker per core by default, of which each of `ranks` ranks gets an equal share.
    Fields that a file omits are those of `cpu`. A `Target` is returned unchanged except for its
    workers.
    """
    if isinstance(name, Target):
        target = name
    else:
        target = _from_file(Path(name)) if name.endswith(".json") else _named(name)
    if workers is None and isinstance(name, str) and target is TARGETS["cpu"]:
        workers = threads_of(ranks)
    if workers is not None:
        target = replace(target, workers=workers)
    _check(target)
    return target


def _named(name: str) -> Target:
    if name not in TARGETS:
        raise UsageError(
            f"There is no target {name!r}",
            hint=f"{did_you_mean(name, TARGETS)} Or give a JSON file with the fields of a target",
        )
    return TARGETS[name]


def target_text(target: Target) -> str:
    """Return the contents of a file with all fields of a target, which `target_of` reads."""
    _check(target)
    return json.dumps(asdict(target), indent=2) + "\n"


def _from_file(path: Path) -> Target:
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"There is no file {path}") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"The target file {path} cannot be read: {error}") from error
    known = [field.name for field in fields(Target)]
    if not isinstance(values, dict) or set(values) - set(known):
        strange = sorted(set(values) - set(known)) if isinstance(values, dict) else [str(values)]
        raise UsageError(
            f"The target file {path} must be a JSON object with only the fields of a target",
            got=", ".join(strange),
            expected=", ".join(known),
            hint=did_you_mean(strange[0], known) if isinstance(values, dict) else "",
        )
    return Target(**{**asdict(TARGETS["cpu"]), "name": path.stem, **values})


def _check(target: Target) -> None:
    for name, value in asdict(target).items():
        if name == "name":
            if not isinstance(value, str):
                raise UsageError(f"The target has name={value!r}", expected="a string")
            continue
        whole = name in ("workers", "grain", "spans", "blocks_per_worker", "span_tokens")
        number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        may_be_zero = name in ("value_us", "alone_bytes_per_us", "matrix_macs_per_us")
        finite = number and 0 <= value <= sys.float_info.max  # neither NaN nor infinity
        if not finite or (value == 0 and not may_be_zero):
            raise UsageError(
                f"The target has {name}={value!r}",
                expected="a positive integer"
                if whole
                else f"a finite number {'of at least' if may_be_zero else 'above'} 0",
            )
        most = MOST_WORKERS if name == "workers" else INT32_MAX
        if whole and value > most:
            raise UsageError(f"The target has {name}={value:,}", expected=f"at most {most:,}")


# GPU bandwidths and rates are the vendors' figures, per microsecond. A worker is a core or an SM;
# an SM alone has 32 KB in flight for about 0.7 µs, and holds the keys and values of 128 tokens,
# with heads of 128 lanes. Matrix units have the rates of dense bf16 in the data sheets of the SXM
# modules, in TFLOPS 312 (A100), 989 (H100 and H200) and 2,250 (B200): a multiply-accumulate is two
# operations.
_SM = 46_800
_SPAN_TOKENS = 128
_MATRICES = {"a100": 156_000_000, "h100": 494_700_000, "h200": 494_700_000, "b200": 1_125_000_000}


def _add_gpu(name: str, *figures: Any) -> None:
    rates = {"alone_bytes_per_us": _SM, "matrix_macs_per_us": _MATRICES[name]}
    add_target(replace(Target(name, *figures, **rates), span_tokens=_SPAN_TOKENS))


add_target(Target("cpu", 2, 60_000, 2.0, 2.0, 10_000, 16, 1, 100_000, blocks_per_worker=4))
_add_gpu("a100", 108, 2_039_000, 1.5, 3.0, 300_000, 16, 16, 9_750_000)
_add_gpu("h100", 132, 3_350_000, 1.2, 2.5, 450_000, 16, 16, 33_500_000)
_add_gpu("h200", 132, 4_800_000, 1.2, 2.5, 450_000, 16, 16, 33_500_000)
_add_gpu("b200", 148, 8_000_000, 1.0, 2.0, 900_000, 16, 16, 37_500_000)
