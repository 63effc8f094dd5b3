"""The measurements of the decode benchmark, and the ratios that it must reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean, median
from typing import Any

from benchmarks.peers.kinds import Sizes, integers_of

EAGER, COMPILED = "Hugging Face eager", "torch.compile"
HUGGING_FACE_TP = "Hugging Face TP, 2 ranks"
LLAMA, OPENVINO = "llama.cpp", "OpenVINO"
ONE, TWO = "tpcompile tp=1", "tpcompile tp=2"
NATIVE, NATIVE_TWO = "tpcompile native tp=1", "tpcompile native tp=2"
MODEL = "qwen3-0.6b"
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
"""The names of dtypes in options and tables, and their names in torch."""


@dataclass(frozen=True)
class Case:
    """What is measured: a decode step after `tokens` tokens, or a prompt of `tokens` tokens."""

    dtype: str
    """The dtype of a checkpoint, or the name of a GGUF file."""
    batch: int
    tokens: int
    prompt: bool = False

    def __str__(self) -> str:
        phase = f"prompt of {self.tokens:,}" if self.prompt else f"context {self.tokens:,}"
        return f"{self.dtype}, batch {self.batch}, {phase}"

    @property
    def tokens_measured(self) -> int:
        """The number of tokens that one measurement processes."""
        return self.batch * (self.tokens if self.prompt else 1)


@dataclass(frozen=True)
class Loaded:
    """A side that was loaded: the format of its weights, and their bytes."""

    weights: str = ""
    """The format to which weights are quantized; empty for the dtype of the case."""
    sizes: Sizes | None = None

    def step_bytes(self, case: Case) -> int | None:
        """Return the bytes that a decode step reads, and of states writes; None for prompts."""
        if case.prompt or self.sizes is None:
            return None
        sequence = case.tokens * self.sizes.token + 2 * self.sizes.states
        return self.sizes.read + case.batch * sequence


@dataclass(frozen=True)
class Weights:
    """The weights that a decode step reads, as the checkpoint or the file stores them."""

    count: int
    bytes: int

    @property
    def bits(self) -> float:
        """The bits of a weight, scales and offsets included."""
        return 8 * self.bytes / self.count


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
    """The largest error of a side's logits against those of another, over the largest logit."""

    side: str
    what: str
    error: float
    ok: bool
    reference: str = EAGER


@dataclass
class Turns:
    """The sides that were measured in turn in one case."""

    case: Case
    seconds: dict[str, list[float]] = field(default_factory=dict)
    bandwidths: dict[str, list[list[float]]] = field(default_factory=dict)
    """Bytes per second of a loop that only reads, before and after each turn of a side."""
    products: dict[str, list[float]] = field(default_factory=dict)
    """The seconds of a step's products on weights in caches, before each turn of a side."""

    def speed(self, side: str, reference: str = EAGER) -> float:
        """Return the speed relative to a reference, or per second if it was not measured."""
        unit = median(self.seconds[reference]) if self.seconds.get(reference) else 1.0
        return unit / median(self.seconds[side])


@dataclass
class Measured:
    """All measurements of one run."""

    model: str
    machine: dict[str, Any] = field(default_factory=dict)
    reference: str = EAGER
    """The side with which the logits of others are compared, and their speeds."""
    weights: dict[str, Weights] = field(default_factory=dict)
    """The weights that a decode step reads, by dtype."""
    loaded: dict[str, dict[str, Loaded]] = field(default_factory=dict)
    """The sides that were loaded, by dtype and name."""
    turns: list[Turns] = field(default_factory=list)
    agreements: list[Agreement] = field(default_factory=list)
    missing: dict[str, dict[str, str]] = field(default_factory=dict)
    """Sides that failed, with the reason, by dtype."""
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

    def tokens_per_second(self, case: Case, side: str) -> float | None:
        """Return the tokens of all sequences that a side processes in a second."""
        turns = self.of(case, side)
        return case.tokens_measured / median(turns.seconds[side]) if turns else None

    def milliseconds(self, case: Case, side: str) -> float | None:
        """Return the median of a side."""
        turns = self.of(case, side)
        return 1e3 * median(turns.seconds[side]) if turns else None

    def about(self, case: Case, side: str) -> Loaded:
        """Return what is known of a side that runs a case."""
        return self.loaded.get(case.dtype, {}).get(side, Loaded())

    def step_bytes(self, case: Case, side: str) -> int | None:
        """Return the bytes of weights and cache that a decode step of a side reads."""
        return self.about(case, side).step_bytes(case)

    def bits(self, case: Case, side: str) -> float | None:
        """Return the bits per weight that a step of a side reads, scales and offsets included."""
        sizes, weights = self.about(case, side).sizes, self.weights.get(case.dtype)
        return 8 * sizes.read / weights.count if sizes and weights else None

    def read_seconds(self, case: Case, side: str) -> float | None:
        """Return the time in which a loop that only reads would read the bytes of a step."""
        reading = self._reading(case, side)
        return median(reading) if reading else None

    def share(self, case: Case, side: str) -> float | None:
        """Return the share of the read bandwidth that a side reaches, if both are known.

        Neighbours change the bandwidth within seconds, so this is the median of each turn's share.
        """
        return self._share(self._reading(case, side), case, side)

    def share_of_limit(self, case: Case, side: str) -> float | None:
        """Return the share of the speed at the limit that a side reaches, if it is known.

        The limit is the longer of the times of reading alone and of the products alone.
        """
        turns = self.of(case, side)
        products = turns.products.get(side) if turns else None
        reading = self._reading(case, side)
        longer = list(map(max, reading, products)) if products else []
        return self._share(longer, case, side)

    def _reading(self, case: Case, side: str) -> list[float]:
        """Return the time in which the loop would read the bytes of a step, for each turn."""
        turns, size = self.of(case, side), self.step_bytes(case, side)
        if turns is None or size is None:
            return []
        return [size / mean(around) for around in turns.bandwidths.get(side, [])]

    def _share(self, least: Sequence[float], case: Case, side: str) -> float | None:
        """Return the median of turns, given the least time of a step in each."""
        turns = self.of(case, side)
        if turns is None or not least:
            return None
        steps = turns.seconds[side]
        steps_per_turn = len(steps) // len(least)
        return median(
            limit / median(steps[turn * steps_per_turn : (turn + 1) * steps_per_turn])
            for turn, limit in enumerate(least)
        )

    def ratio(self, case: Case, side: str, peer: str) -> float | None:
        """Return a side's speed relative to a peer; None if one of them was not measured.

        Sides that were not measured in turn with each other are compared through the reference.
        """
        turns, other = self.of(case, side), self.of(case, peer)
        if turns is None or other is None:
            return None
        shared = next(
            (t for t in self.turns if t.case == case and {side, peer} <= set(t.seconds)), None
        )
        turns, other = shared or turns, shared or other
        return turns.speed(side, self.reference) / other.speed(peer, self.reference)

    def best_peer(self, case: Case, side: str) -> str | None:
        """Return the fastest peer of a case whose weights have as many bits as those of a side."""
        wanted = integers_of(self.about(case, side).weights)
        peers = (
            name
            for name in sides_of(self, case)
            if not is_ours(name) and integers_of(self.about(case, name).weights) == wanted
        )
        speeds = (
            (turns.speed(peer, self.reference), peer)
            for peer in peers
            if (turns := self.of(case, peer))
        )
        ranked = list(speeds)
        return max(ranked)[1] if ranked else None

    def targets(self) -> list[tuple[Target, float | None]]:
        """Return the targets of the requested measurements, each with the ratio reached."""
        if self.model != MODEL:
            return []
        return [(t, self.ratio(t.case, t.side, t.peer)) for t in TARGETS if t.case in self.cases]

    @property
    def ok(self) -> bool:
        return (
            all(a.ok for a in self.agreements)
            and not any(self.missing.values())
            and all(ratio is not None and ratio >= t.least for t, ratio in self.targets())
        )


def to_json(measured: Measured) -> dict[str, Any]:
    """Return everything measured, and for readers the figures of the table and the targets."""
    figures = [
        {
            **asdict(case),
            "side": side,
            "weights": measured.about(case, side).weights,
            "milliseconds": measured.milliseconds(case, side),
            "tokens_per_second": measured.tokens_per_second(case, side),
            "bytes_read": measured.step_bytes(case, side),
            "bits_per_weight": measured.bits(case, side),
            "share_of_read": measured.share(case, side),
            "share_of_limit": measured.share_of_limit(case, side),
            "over_eager": measured.ratio(case, side, EAGER),
            "over_reference": measured.ratio(case, side, measured.reference),
            "over_best_peer": measured.ratio(case, side, best) if best else None,
        }
        for case in measured.cases
        for side in sides_of(measured, case)
        for best in [measured.best_peer(case, side)]
    ]
    targets = [
        {**asdict(target), "reached": ratio, "ok": ratio is not None and ratio >= target.least}
        for target, ratio in measured.targets()
    ]
    return {"ok": measured.ok, "figures": figures, "targets": targets, **asdict(measured)}


def from_json(written: Mapping[str, Any]) -> Measured:
    """Return the measurements that `to_json` has written."""
    return Measured(
        written["model"],
        written["machine"],
        written["reference"],
        {dtype: Weights(**weights) for dtype, weights in written["weights"].items()},
        {dtype: _loaded(sides) for dtype, sides in written["loaded"].items()},
        [Turns(**{**turns, "case": Case(**turns["case"])}) for turns in written["turns"]],
        [Agreement(**agreement) for agreement in written["agreements"]],
        written["missing"],
        written["not_installed"],
        written["not_supported"],
    )


def _loaded(sides: Mapping[str, Any]) -> dict[str, Loaded]:
    return {
        name: Loaded(side["weights"], Sizes(**side["sizes"]) if side["sizes"] else None)
        for name, side in sides.items()
    }


def is_ours(side: str) -> bool:
    """Return whether a side runs tpcompile."""
    return side.startswith("tpcompile")


def sides_of(measured: Measured, case: Case) -> list[str]:
    """Return the sides that were measured in a case."""
    return list(dict.fromkeys(s for t in measured.turns if t.case == case for s in t.seconds))
