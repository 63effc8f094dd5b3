"""The measurements of the decode benchmark, and the ratios that it must reach."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

EAGER, HUGGING_FACE_TP = "Hugging Face eager", "Hugging Face TP, 2 ranks"
ONE, TWO = "tpcompile tp=1", "tpcompile tp=2"
NATIVE, NATIVE_TWO = "tpcompile native tp=1", "tpcompile native tp=2"
MODEL = "qwen3-0.6b"


@dataclass(frozen=True)
class Target:
    """The required speed of a side relative to a peer. `what` is a context length or `prefill`."""

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
"""Targets for the shapes of MODEL. Other models are measured, but have no targets."""


@dataclass(frozen=True)
class Agreement:
    """The largest error of a side's logits against eager's, relative to the largest logit."""

    side: str
    what: str
    error: float
    ok: bool


@dataclass
class Measured:
    """Seconds of each step, by side and by measurement."""

    model: str
    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    agreements: list[Agreement] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    """Sides that could not be measured, with the reason."""
    bandwidths: list[float] = field(default_factory=list)
    """Bytes per second of a loop that only reads, measured in turn with the sides."""
    step_bytes: dict[str, int] = field(default_factory=dict)
    """The bytes that a step must read, by measurement."""

    def share(self, side: str, what: str) -> float | None:
        """Return the share of the read bandwidth that a side reaches, if both are known."""
        seconds = self.seconds.get(side, {}).get(what)
        if not seconds or not self.bandwidths or what not in self.step_bytes:
            return None
        return self.step_bytes[what] / median(seconds) / median(self.bandwidths)

    def ratio(self, target: Target) -> float | None:
        """Return the side's speed relative to its peer; None if one of them was not measured."""
        pair = [self.seconds.get(s, {}).get(target.what) for s in (target.side, target.peer)]
        own, peer = pair
        return median(peer) / median(own) if own and peer else None

    def targets(self) -> list[tuple[Target, float | None]]:
        """Return the targets of the requested measurements, each with the ratio reached."""
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
