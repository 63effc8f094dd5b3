"""Pairs of blocks of steps, the figures made of them, and the limits that they must keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean, median, quantiles
from typing import Any

from benchmarks.contend.conditions import BY_NAME, CORES, LATE, OURS, Condition
from benchmarks.decode_measured import MODEL

AGREEMENT = 1.1
"""The largest ratio of the read bandwidths before and after a pair that counts."""
Block = list[float]
"""The seconds of each step."""


@dataclass(frozen=True)
class Pair:
    """A block of steps alone and the next one in a condition, of one process or of both twins."""

    alone: list[Block]
    loaded: list[Block]
    before: float
    """The bytes per second of the read loop before the pair."""
    after: float

    @property
    def counts(self) -> bool:
        """Whether the machine was as fast after the pair as before it."""
        least, most = sorted((self.before, self.after))
        return most <= AGREEMENT * least

    def ratio(self, condition: Condition) -> float:
        """Return how much longer a step takes than alone; of twins, that of the slower one."""
        alone, loaded = self.alone, self.loaded
        return max(
            middle(with_it, condition) / middle(without, condition)
            for without, with_it in zip(alone, loaded, strict=True)
        )

    @property
    def late(self) -> float:
        """The 90th percentile of the steps in the condition, relative to their median."""
        return max(_percentile_90(block) / median(block) for block in self.loaded)


def middle(block: Block, condition: Condition) -> float:
    """Return the median of steps, or with a quota the mean: it stops a few steps for long."""
    return mean(block) if condition.quota else median(block)


def _percentile_90(block: Block) -> float:
    return quantiles(block, n=10, method="inclusive")[-1] if len(block) > 1 else block[0]


@dataclass
class Series:
    """All pairs of a side in a condition, also those that do not count."""

    condition: str
    side: str
    pairs: list[Pair] = field(default_factory=list)

    @property
    def counted(self) -> list[Pair]:
        return [pair for pair in self.pairs if pair.counts]

    @property
    def dropped(self) -> int:
        return len(self.pairs) - len(self.counted)

    @property
    def of(self) -> Condition:
        return BY_NAME[self.condition]

    @property
    def ratio(self) -> float | None:
        """The median of the ratios of the pairs; None if no pair counts."""
        return median(pair.ratio(self.of) for pair in self.counted) if self.counted else None

    @property
    def late(self) -> float | None:
        """The median over the pairs of the 90th percentile over the median."""
        return median(pair.late for pair in self.counted) if self.counted else None

    def milliseconds(self, alone: bool) -> float | None:
        """Return the time of a step alone or in the condition; of twins, that of the slower one."""
        sides = [pair.alone if alone else pair.loaded for pair in self.counted]
        if not sides:
            return None
        return 1e3 * median(max(middle(block, self.of) for block in blocks) for blocks in sides)


@dataclass(frozen=True)
class Target:
    """A limit of a side in a condition."""

    side: str
    condition: str
    what: str
    most: float
    reached: float | None
    """None if it was not measured."""

    @property
    def ok(self) -> bool:
        return self.reached is not None and self.reached <= self.most


@dataclass
class Measured:
    """All measurements of one run."""

    model: str
    cores: int
    cpu: str = ""
    series: list[Series] = field(default_factory=list)
    impossible: dict[str, str] = field(default_factory=dict)
    """Conditions that this system does not allow, with the reason. They are not failures."""
    missing: dict[str, str] = field(default_factory=dict)
    """Sides that failed, with the reason."""
    not_installed: dict[str, str] = field(default_factory=dict)
    """Peers whose packages are not installed, with what to do. They are not failures."""
    gaps: dict[str, list[float]] = field(default_factory=dict)
    """The largest gap of each side's tokens to the best ones, and the gap that is allowed."""

    def targets(self) -> list[Target]:
        """Return the limits of the measured series. Other models and machines have none."""
        if self.model != MODEL or self.cores != CORES:
            return []
        targets = []
        for series in self.series:
            if (factor := OURS.get(series.side)) is None:
                continue
            most = round(series.of.most * factor, 3)
            targets.append(Target(series.side, series.condition, "ratio", most, series.ratio))
            if series.of.busy:
                most = round(LATE * factor, 3)
                targets.append(Target(series.side, series.condition, "late", most, series.late))
        return targets

    def right(self, side: str) -> bool:
        """Return whether the tokens of a side are those of the model, but for rounding."""
        gap, allowed = self.gaps[side]
        return gap <= allowed

    @property
    def bandwidths(self) -> list[float]:
        """Return all readings of the read loop."""
        pairs = [pair for series in self.series for pair in series.pairs]
        return [reading for pair in pairs for reading in (pair.before, pair.after)]

    @property
    def ok(self) -> bool:
        return (
            not self.missing
            and all(map(self.right, self.gaps))
            and all(target.ok for target in self.targets())
        )


def to_json(measured: Measured) -> dict[str, Any]:
    """Return everything measured, and for readers the figures of the table and the targets."""
    figures = [
        {
            "condition": series.condition,
            "side": series.side,
            "alone_ms": series.milliseconds(alone=True),
            "loaded_ms": series.milliseconds(alone=False),
            "ratio": series.ratio,
            "late": series.late,
            "pairs": len(series.counted),
            "dropped": series.dropped,
        }
        for series in measured.series
    ]
    targets = [{**asdict(target), "ok": target.ok} for target in measured.targets()]
    return {"ok": measured.ok, "figures": figures, "targets": targets, **asdict(measured)}


def from_json(written: Mapping[str, Any]) -> Measured:
    """Return the measurements that `to_json` has written."""
    series = [
        Series(item["condition"], item["side"], [Pair(**pair) for pair in item["pairs"]])
        for item in written["series"]
    ]
    names = ("model", "cores", "cpu", "impossible", "missing", "not_installed", "gaps")
    return Measured(**{name: written[name] for name in names}, series=series)


def merged(runs: Sequence[Measured]) -> Measured:
    """Return several runs as one. Pairs of the same side and condition are put together."""
    kinds = {(run.model, run.cores, run.cpu) for run in runs}
    if len(kinds) > 1:
        raise ValueError(f"results must be of one model and machine, got {sorted(kinds)}")
    combined = Measured(runs[0].model, runs[0].cores, runs[0].cpu)
    series: dict[tuple[str, str], Series] = {}
    for run in runs:
        for run_series in run.series:
            merged_series = series.setdefault(
                (run_series.condition, run_series.side),
                Series(run_series.condition, run_series.side),
            )
            merged_series.pairs += run_series.pairs
        combined.impossible |= run.impossible
        combined.missing |= run.missing
        combined.not_installed |= run.not_installed
        for side, gap in run.gaps.items():
            worst = [*(combined.gaps[side] for _ in range(side in combined.gaps)), gap]
            combined.gaps[side] = max(worst, key=lambda pair: pair[0] - pair[1])
    combined.series = list(series.values())
    return combined
