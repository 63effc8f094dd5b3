"""The constants of a target, fitted to the measured times of instructions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from tpcompile.errors import UsageError
from tpcompile.vm.program import Program
from tpcompile.vm.program.instruction import StepInstruction
from tpcompile.vm.targets import Target

_REWEIGHTED = 20
_RATES_PER_OCTAVE = 16
_LEAST_ERROR = 1e-3
"""Relative errors below this count alike, so that a weight is never infinite."""
_LEAST_US = 0.01
_CLEARLY = 1e-4
"""The minimum gain in error for which a faster rate of arithmetic is preferred."""


@dataclass(frozen=True)
class Sample:
    """The typical time of the instructions of a program that have the same cost."""

    name: str
    traffic: int
    work: int
    values: int
    us: float
    share: float = 1.0
    """Their share of the time of all instructions."""

    def predicted(self, target: Target) -> float:
        """Return the time on a target, as the cost of instructions estimates it."""
        loading = self.traffic / target.worker_bytes_per_us
        longer = max(loading, self.work / target.worker_macs_per_us)
        return target.instruction_us + longer + self.values * target.value_us


def samples_of(program: Program, costs: Sequence[float], target: Target) -> list[Sample]:
    """Group the instructions that have the same cost; the time of a group is its median.

    The work of matrix units is left out, because their rate is not fitted.
    """
    groups: dict[tuple[str, int, int, int], list[float]] = {}
    for instruction, us in zip(program.instructions, costs, strict=True):
        assert isinstance(instruction, StepInstruction)
        work = (
            instruction.work if instruction.macs_per_us(target) == target.worker_macs_per_us else 0
        )
        groups.setdefault(
            (instruction.name, instruction.traffic, work, instruction.values), []
        ).append(us)
    times = {key: median(durations) for key, durations in groups.items()}
    whole = sum(times[key] * len(durations) for key, durations in groups.items())
    return [Sample(*key, times[key], times[key] * len(groups[key]) / whole) for key in groups]


@dataclass(frozen=True)
class Fit:
    """A target with fitted constants, and the mean relative error of its samples."""

    target: Target
    error: float


def fit(samples: Sequence[Sample], target: Target) -> Fit:
    """Return `target` with the constants that predict the samples with the least error.

    The error is relative and weighted by the square root of each sample's share, so that neither
    the many short instructions nor the few long ones decide alone. For one rate of arithmetic, the
    constants solve a linear problem. So rates are tried in turn, from the highest that a sample
    reached to eight times this rate.
    """
    if not any(sample.traffic for sample in samples):
        raise UsageError("Constants can only be fitted to samples that load bytes")
    best: Fit | None = None
    for rate in _rates(samples, target):
        fitted = _fitted(samples, target, rate)
        if best is None or fitted.error < best.error - _CLEARLY:
            best = fitted
    assert best is not None
    return best


def _rates(samples: Sequence[Sample], target: Target) -> list[float]:
    """Return rates of arithmetic of one worker to try, ascending."""
    reached = [sample.work / sample.us for sample in samples if sample.work]
    if not reached:
        return [target.worker_macs_per_us]
    low, octaves = max(reached), 3
    return [low * 2 ** (n / _RATES_PER_OCTAVE) for n in range(octaves * _RATES_PER_OCTAVE + 1)]


def _fitted(samples: Sequence[Sample], target: Target, rate: float) -> Fit:
    """Fit all constants except the rate of arithmetic of one worker."""
    computes = torch.tensor([sample.work / rate for sample in samples], dtype=torch.float64)
    columns = torch.tensor(
        [[1.0, float(sample.traffic), float(sample.values)] for sample in samples],
        dtype=torch.float64,
    )
    us = torch.tensor([sample.us for sample in samples], dtype=torch.float64)
    shares = torch.tensor([sample.share for sample in samples], dtype=torch.float64).sqrt()
    shares /= shares.sum()
    solution = _least(columns, us, shares)
    weights = shares
    for _ in range(_REWEIGHTED):
        bound = computes > columns[:, 1] * solution[1]
        coefficients = columns.clone()
        coefficients[bound, 1] = 0
        remaining = us - computes.where(bound, torch.zeros_like(us))
        solution = _least(coefficients / us[:, None], remaining / us, weights)
        errors = (_total(columns, solution, computes) / us - 1).abs()
        weights = shares / errors.clamp(min=_LEAST_ERROR)
    error = float(((_total(columns, solution, computes) / us - 1).abs() * shares).sum())
    return Fit(_with(target, solution, rate), error)


def _total(columns: torch.Tensor, solution: torch.Tensor, computes: torch.Tensor) -> torch.Tensor:
    loads = columns[:, 1] * solution[1]
    return (
        columns[:, 0] * solution[0] + torch.maximum(loads, computes) + columns[:, 2] * solution[2]
    )


def _least(columns: torch.Tensor, wanted: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Solve the weighted least squares problem with coefficients of at least 0."""
    scale = columns.abs().amax(0).clamp(min=1e-300)
    roots = weights.sqrt()[:, None]
    active = [n for n in range(columns.shape[1]) if bool(columns[:, n].any())]
    while True:
        solution = torch.zeros(columns.shape[1], dtype=columns.dtype)
        matrix = (columns / scale)[:, active] * roots
        solution[active] = torch.linalg.lstsq(
            matrix, wanted[:, None] * roots, driver="gelsd"
        ).solution[:, 0]
        lowest = min(active, key=lambda n: float(solution[n]))
        if solution[lowest] >= 0 or len(active) == 1:
            return solution.clamp(min=0) / scale
        active.remove(lowest)


def _with(target: Target, solution: torch.Tensor, rate: float) -> Target:
    instruction, per_byte, per_value = solution.tolist()
    bytes_per_us = target.workers / per_byte if per_byte else target.bytes_per_us
    instruction = max(instruction, _LEAST_US)
    return replace(
        target,
        bytes_per_us=bytes_per_us,
        macs_per_us=rate * target.workers,
        instruction_us=instruction,
        value_us=per_value,
        exchange_us=instruction,
        link_bytes_per_us=bytes_per_us,
    )
