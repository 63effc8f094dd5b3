"""The measurements of the decode benchmark, and the ratios that it must reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

EAGER, COMPILED = "Hugging Face eager", "torch.compile"
HUGGING_FACE_TP = "Hugging Face TP, 2 ranks"
LLAMA, OPENVINO = "llama.cpp", "OpenVINO"
ONE, TWO = "tpcompile tp=1", "tpcompile tp=2"
NATIVE, NATIVE_TWO = "tpcompile native tp=1", "tpcompile native tp=2"
PEERS = (EAGER, COMPILED, HUGGING_FACE_TP, LLAMA, OPENVINO)
MODEL = "qwen3-0.6b"
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
"""The names of dtypes in options and tables, and their names in torch."""


@dataclass(frozen=True)
class Case:
    """What is measured: a decode step after `tokens` tokens, or a prompt of `tokens` tokens."""

    dtype: str
    batch: int
    tokens: int
    prompt: bool = False

    def __str__(self) -> str:
        what = f"prompt of {self.tokens:,}" if self.prompt else f"context {self.tokens:,}"
        return f"{self.dtype}, batch {self.batch}, {what}"

    @property
    def tokens_measured(self) -> int:
        """The number of tokens that one measurement processes."""
        return self.batch * (self.tokens if self.prompt else 1)


@dataclass(frozen=True)
class Target:
    """The required speed of a side relative to a peer."""

    side: str
    peer: str
    case: Case
    least: float


SHORT, LONG, PROMPT = Case("bf16", 1, 64), Case("bf16", 1, 1024), Case("bf16", 1, 512, prompt=True)
TARGETS = (
    Target(TWO, HUGGING_FACE_TP, SHORT, 2.0),
    Target(TWO, HUGGING_FACE_TP, LONG, 2.0),
    Target(ONE, EAGER, SHORT, 1.1),
    Target(ONE, EAGER, LONG, 1.6),
    Target(ONE, EAGER, PROMPT, 1.1),
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
class Turns:
    """The sides that were measured in turn in one case."""

    case: Case
    step_bytes: int | None = None
    """The bytes that a step must read; None for prompts."""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    bandwidths: list[float] = field(default_factory=list)
    """Bytes per second of a loop that only reads, measured in turn with the sides."""

    def speed(self, side: str) -> float:
        """Return the speed of a side relative to eager, or per second if eager was not asked."""
        unit = median(self.seconds[EAGER]) if EAGER in self.seconds else 1.0
        return unit / median(self.seconds[side])

    @property
    def least_seconds(self) -> float | None:
        """The time in which a loop that only reads would read the bytes of a step."""
        if self.step_bytes is None or not self.bandwidths:
            return None
        return self.step_bytes / median(self.bandwidths)


@dataclass
class Measured:
    """All measurements of one run."""

    model: str
    machine: dict[str, Any] = field(default_factory=dict)
    turns: list[Turns] = field(default_factory=list)
    agreements: list[Agreement] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    """Sides that failed, with the reason."""
    not_installed: dict[str, str] = field(default_factory=dict)
    """Peers whose packages are not installed, with what to do. They are not failures."""
    not_supported: dict[str, str] = field(default_factory=dict)
    """Sides that do not support some cases, with the reason. They are not failures either."""

    @property
    def title(self) -> str:
        """The model, and where it ran."""
        machine = "".join(f", {name} {value}" for name, value in self.machine.items())
        return self.model + machine

    @property
    def cases(self) -> list[Case]:
        return list(dict.fromkeys(turns.case for turns in self.turns))

    def of(self, case: Case, side: str) -> Turns | None:
        """Return the turns in which a side was measured."""
        return next((t for t in self.turns if t.case == case and t.seconds.get(side)), None)

    def milliseconds(self, case: Case, side: str) -> float | None:
        """Return the median of a side."""
        turns = self.of(case, side)
        return 1e3 * median(turns.seconds[side]) if turns else None

    def share(self, case: Case, side: str) -> float | None:
        """Return the share of the read bandwidth that a side reaches, if both are known."""
        turns = self.of(case, side)
        if turns is None or turns.least_seconds is None:
            return None
        return turns.least_seconds / median(turns.seconds[side])

    def ratio(self, case: Case, side: str, peer: str) -> float | None:
        """Return a side's speed relative to a peer; None if one of them was not measured.

        Sides that were not measured in turn with each other are compared through eager.
        """
        own, other = self.of(case, side), self.of(case, peer)
        if own is None or other is None:
            return None
        shared = next(
            (t for t in self.turns if t.case == case and {side, peer} <= set(t.seconds)), None
        )
        own, other = shared or own, shared or other
        return own.speed(side) / other.speed(peer)

    def best_peer(self, case: Case) -> str | None:
        """Return the fastest peer of a case."""
        found = [(t.speed(peer), peer) for peer in PEERS if (t := self.of(case, peer))]
        return max(found)[1] if found else None

    def targets(self) -> list[tuple[Target, float | None]]:
        """Return the targets of the requested measurements, each with the ratio reached."""
        if self.model != MODEL:
            return []
        return [(t, self.ratio(t.case, t.side, t.peer)) for t in TARGETS if t.case in self.cases]

    @property
    def ok(self) -> bool:
        return (
            all(a.ok for a in self.agreements)
            and not self.missing
            and all(ratio is not None and ratio >= t.least for t, ratio in self.targets())
        )


def to_json(measured: Measured) -> dict[str, Any]:
    """Return everything measured, and for readers the figures of the table and the targets."""
    figures = [
        {
            **asdict(case),
            "side": side,
            "milliseconds": measured.milliseconds(case, side),
            "share_of_read": measured.share(case, side),
            "over_eager": measured.ratio(case, side, EAGER),
            "over_best_peer": measured.ratio(case, side, best) if best else None,
        }
        for case in measured.cases
        for best in [measured.best_peer(case)]
        for side in sides_of(measured, case)
    ]
    targets = [
        {**asdict(target), "reached": ratio, "ok": ratio is not None and ratio >= target.least}
        for target, ratio in measured.targets()
    ]
    return {"ok": measured.ok, "figures": figures, "targets": targets, **asdict(measured)}


def from_json(found: Mapping[str, Any]) -> Measured:
    """Return the measurements that `to_json` has written."""
    return Measured(
        found["model"],
        found["machine"],
        [Turns(**{**turns, "case": Case(**turns["case"])}) for turns in found["turns"]],
        [Agreement(**agreement) for agreement in found["agreements"]],
        found["missing"],
        found["not_installed"],
        found["not_supported"],
    )


def sides_of(measured: Measured, case: Case) -> list[str]:
    """Return the sides that were measured in a case."""
    return list(dict.fromkeys(s for t in measured.turns if t.case == case for s in t.seconds))
