"""The figures of the `servers` benchmark, and the ratios that it must reach."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.peers.kinds import Continued
from benchmarks.serve.runs import part
from tpcompile.inspect.tables import table_text

ENGINE, SERVER = "tpcompile engine", "tpcompile serve"
TARGETS = {
    "Hugging Face generate_batch": (ENGINE, 2.0),
    "transformers serve": (SERVER, 2.0),
    "llama.cpp server": (SERVER, 1.2),
    "OpenVINO GenAI": (ENGINE, 1.0),
}
"""The side of tpcompile that a peer is compared with, and the least ratio of tokens per second.
The time to the first token at the 95th percentile must not be above the peer's."""
PREFIX_GAIN = 5.0
"""The least ratio of the times to the first token without and with a shared prefix."""


@dataclass(frozen=True)
class Case:
    """What all sides do."""

    requests: int
    prompt: int
    new: int
    prefix: int


@dataclass(frozen=True)
class Round:
    """The results of all sides in turn."""

    bandwidth: float
    results: dict[str, list[Continued]]

    def per_s(self, side: str) -> float:
        """Return the new tokens per second."""
        results = self.results[side]
        last = max(times[-1] for _, times in results)
        return sum(len(tokens) for tokens, _ in results) / last

    def first(self, side: str) -> float:
        """Return the 95th percentile of the seconds to the first token."""
        return part([times[0] for _, times in self.results[side]], 95)


@dataclass(frozen=True)
class Reached:
    """A target, and what was measured."""

    target: str
    ratios: tuple[float, ...]
    """The ratio in each round."""
    ok: bool

    @property
    def ratio(self) -> float:
        return median(self.ratios)


@dataclass
class Measured:
    """All measurements of one run."""

    model: str
    threads: int
    case: Case
    rounds: list[Round] = field(default_factory=list)
    prefixes: dict[str, tuple[list[float], list[float]]] = field(default_factory=dict)
    """The seconds to the first token without and with a shared prefix."""
    gaps: dict[str, float] = field(default_factory=dict)
    allowed: float = 0.0
    failed: dict[str, str] = field(default_factory=dict)
    not_installed: dict[str, str] = field(default_factory=dict)

    @property
    def sides(self) -> list[str]:
        """The sides that have finished all rounds."""
        return list(self.rounds[-1].results)

    def per_s(self, side: str) -> float:
        """Return the median of new tokens per second."""
        return median(round_.per_s(side) for round_ in self.rounds)

    def first(self, side: str, percent: int) -> float:
        """Return a percentile of the seconds to the first token."""
        every = [times[0] for round_ in self.rounds for _, times in round_.results[side]]
        return part(every, percent)

    def whole(self, side: str) -> bool:
        """Return whether all requests have got all tokens."""
        return all(
            len(tokens) == self.case.new
            for round_ in self.rounds
            for tokens, _ in round_.results[side]
        )

    def right(self, side: str) -> bool:
        """Return whether a side's tokens are those of the model, but for rounding."""
        return self.whole(side) and self.gaps[side] <= self.allowed

    def prefix_gain(self, side: str) -> float | None:
        """Return how much sooner the first token comes after a shared prefix."""
        cold, warm = self.prefixes.get(side, ([], []))
        return median(cold) / median(warm) if warm else None

    def targets(self) -> list[Reached]:
        """Return the targets of the sides that were measured: medians of the rounds' ratios."""
        reached = []
        for peer, (side, least) in TARGETS.items():
            if {peer, side} <= set(self.sides):
                ratios = tuple(round_.per_s(side) / round_.per_s(peer) for round_ in self.rounds)
                name = f"{side} over {peer}, at least {least}"
                reached.append(Reached(name, ratios, median(ratios) >= least))
                ratios = tuple(round_.first(side) / round_.first(peer) for round_ in self.rounds)
                name = f"first token of {side} over {peer}, 95 %, at most 1"
                reached.append(Reached(name, ratios, median(ratios) <= 1))
        if ENGINE in self.prefixes:
            cold, warm = self.prefixes[ENGINE]
            ratios = tuple(a / b for a, b in zip(cold, warm, strict=True))
            name = f"first token without over with the shared prefix, at least {PREFIX_GAIN:g}"
            reached.append(Reached(name, ratios, median(ratios) >= PREFIX_GAIN))
        return reached

    @property
    def ok(self) -> bool:
        """Whether all sides agree, none has failed, and all targets are met."""
        right = all(self.right(side) for side in self.sides)
        return right and not self.failed and all(target.ok for target in self.targets())

    def to_json(self) -> dict[str, Any]:
        sides = {
            side: {
                "tokens_per_s": self.per_s(side),
                "first_token_s": {q: self.first(side, q) for q in (50, 95)},
                "prefix_gain": self.prefix_gain(side),
                "gap": self.gaps[side],
                "ok": self.right(side),
            }
            for side in self.sides
        }
        targets = [asdict(target) | {"reached": target.ratio} for target in self.targets()]
        return {"ok": self.ok, "sides": sides, "targets": targets, **asdict(self)}


def show(measured: Measured) -> None:
    """Print the table."""
    case = measured.case
    title = (
        f"{measured.model}, {measured.threads} threads: {case.requests} requests at once, "
        f"prompts of {case.prompt:,} tokens, {case.new} new tokens"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("side")
    for name in ("tokens/s", "first token s, 50 %", "95 %", "prefix hit ×", "gap"):
        table.add_column(name, justify="right")
    for side in measured.sides:
        gain = measured.prefix_gain(side)
        table.add_row(
            side,
            f"{measured.per_s(side):.1f}",
            f"{measured.first(side, 50):.2f}",
            f"{measured.first(side, 95):.2f}",
            "" if gain is None else f"{gain:.1f}",
            f"{measured.gaps[side]:.4f}{'' if measured.right(side) else ' WRONG'}",
        )
    text = table_text(table)
    speeds = ", ".join(f"{round_.bandwidth / 1e9:.0f}" for round_ in measured.rounds)
    text += f"Read bandwidth in each round, GB/s: {speeds}\n"
    text += f"Gap: largest distance from the best logit; allowed: {measured.allowed:.4f}\n"
    for target in measured.targets():
        ratios = ", ".join(f"{ratio:.2f}" for ratio in target.ratios)
        text += (
            f"{'met' if target.ok else 'MISSED'}: {target.target}: {target.ratio:.3f} ({ratios})\n"
        )
    for side, why in measured.not_installed.items():
        text += f"Not installed: {side}: {why}\n"
    for side, why in measured.failed.items():
        text += f"FAILED: {side}: {why}\n"
    sys.stdout.write(text)
