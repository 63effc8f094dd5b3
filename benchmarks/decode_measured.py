"""What the decode benchmark measured, and the ratios that it must reach."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

EAGER, HUGGING_FACE_TP = "Hugging Face eager", "Hugging Face TP, 2 ranks"
ONE, TWO = "tpcompile tp=1", "tpcompile tp=2"
MODEL = "qwen3-0.6b"


@dataclass(frozen=True)
class Target:
    """How many times as fast one side must be as another; what: a context, or `prefill`."""

    side: str
    peer: str
    what: str
    least: float


TARGETS = (
    Target(TWO, HUGGING_FACE_TP, "64", 2.0),
    Target(TWO, HUGGING_FACE_TP, "1024", 2.0),
    Target(ONE, EAGER, "64", 1.1),
    Target(ONE, EAGER, "1024", 1.6),
    Target(ONE, EAGER, "prefill", 1.1),
)
"""For the shapes of MODEL alone: other shapes are shown and not judged."""


@dataclass(frozen=True)
class Agreement:
    """How far the logits of a side are from eager's, over the largest of them."""

    side: str
    what: str
    error: float
    ok: bool


@dataclass
class Measured:
    """Seconds of each step, by side and by what was measured."""

    model: str
    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    agreements: list[Agreement] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    """Sides that could not be measured, and why."""

    def ratio(self, target: Target) -> float | None:
        """How many times as fast; None if one of the two was not measured."""
        pair = [self.seconds.get(s, {}).get(target.what) for s in (target.side, target.peer)]
        own, peer = pair
        return median(peer) / median(own) if own and peer else None

    def targets(self) -> list[tuple[Target, float | None]]:
        """Those for what was asked for, each with what was reached."""
        if self.model != MODEL:
            return []
        asked = {what for found in self.seconds.values() for what in found}
        return [(t, self.ratio(t)) for t in TARGETS if t.what in asked]

    @property
    def ok(self) -> bool:
        return (
            all(a.ok for a in self.agreements)
            and not self.missing
            and all(ratio is not None and ratio >= t.least for t, ratio in self.targets())
        )
