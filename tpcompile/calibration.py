"""`calibrate`: measure decode steps on this machine, and fit the constants of a target."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tpcompile.backends.devices import machine_of
from tpcompile.backends.measuring import REPEATS, RandomMemory, measure
from tpcompile.backends.rotation import CPU
from tpcompile.frontend import config_of
from tpcompile.inspect.step_trace import StepTrace, step_trace
from tpcompile.scheduling import schedule
from tpcompile.vm.program import Program
from tpcompile.vm.schedule.clock import timing
from tpcompile.vm.schedule.fitting import Fit, Sample, fit, samples_of
from tpcompile.vm.schedule.measured import timing_at
from tpcompile.vm.targets import Target

Say = Callable[[str], None]

_FIRST_LAYERS = 4
_BATCHES = (4, 16)
"""The batches of steps of the first layers, which determine the rates of arithmetic and values."""
_SHORT = 64


@dataclass(frozen=True)
class Case:
    """A decode step to measure. With `layers`, only the first layers and the head are run."""

    model: str
    context: int
    batch: int = 1
    layers: int | None = None
    weights: str | None = None
    head: str | None = None
    activations: str = "16"
    kv: str | None = None
    """`weights`, `head`, `activations` and `kv` are those of `compile`."""

    @property
    def name(self) -> str:
        first = "" if self.layers is None else f", first {self.layers} layers"
        first += "" if self.weights is None else f", {self.weights}"
        first += "" if self.kv is None else f", KV cache in {self.kv}"
        return f"{self.model}{first}, batch {self.batch}, {self.context:,} tokens"


@dataclass(frozen=True)
class Calibration:
    """A fitted target, and the measured step of all layers that it was fitted to."""

    fit: Fit
    trace: StepTrace

    @property
    def target(self) -> Target:
        """The target with the fitted constants."""
        return self.fit.target


def calibrate(
    model: str,
    *,
    context: int = 1024,
    name: str = "calibrated",
    workers: int | None = None,
    repeats: int = REPEATS,
    device: torch.device = CPU,
    weights: str | None = None,
    head: str | None = None,
    activations: str = "16",
    kv: str | None = None,
    say: Say = lambda text: None,
) -> Calibration:
    """Measure steps of MODEL with random weights, and fit a target for the machine of `device`.

    All layers run with one sequence of `context` tokens. The first layers also run with a few
    sequences: the time of a single one is that of its loads, so it does not show the rates of
    arithmetic and of values. Ranks of one machine share its memory, so the delay and the
    bandwidth between ranks are those of instructions and of the memory. `weights`, `head`,
    `activations` and `kv` are those of `compile`.
    """
    target = replace(machine_of(device), name=name)
    if workers is not None:
        target = replace(target, workers=workers)
    layers = min(_FIRST_LAYERS, config_of(model).num_hidden_layers)
    first = (Case(model, _SHORT, batch, layers) for batch in _BATCHES)
    quantized: dict[str, Any] = {
        "weights": weights,
        "head": head,
        "activations": activations,
        "kv": kv,
    }
    cases = [replace(case, **quantized) for case in (Case(model, context), *first)]
    random, samples, whole = RandomMemory(device), list[Sample](), None
    for case in cases:
        program = program_of(case, target, say)
        say(f"measuring {case.name}")
        steps = measure(program, case.context, repeats=repeats, random=random)
        samples += samples_of(program, steps.costs, target)
        whole = whole or steps
    say("fitting")
    assert whole is not None
    fitted = fit(samples, target)
    return Calibration(fitted, step_trace(cases[0].name, whole, fitted.target, context))


def program_of(case: Case, target: Target, say: Say = lambda text: None) -> Program:
    """Return the verified program of a step, for the workers of a target."""
    say(f"scheduling {case.name}")
    config = copy.deepcopy(config_of(case.model))
    if case.layers is not None:
        config.num_hidden_layers = case.layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: case.layers]
    return schedule(
        config,
        target=target,
        batch=case.batch,
        context=case.context,
        weights=case.weights,
        head=case.head,
        activations=case.activations,
        kv=case.kv,
    ).program


@dataclass(frozen=True)
class Prediction:
    """The predicted and the measured time of a step, in µs."""

    case: Case
    predicted_us: float
    measured_us: float
    median_us: float
    undisturbed_us: float
    """The simulated time of a step whose instructions take their measured times."""

    @property
    def ratio(self) -> float:
        """The predicted time over the measured one."""
        return self.predicted_us / self.measured_us

    def to_json(self) -> dict[str, Any]:
        values = vars(self.case) | {
            name: round(value, 1) for name, value in vars(self).items() if name != "case"
        }
        return {**values, "ratio": round(self.ratio, 4)}


def cases_of(model: str, other: str) -> list[Case]:
    """Return the steps whose predictions `verify` checks: contexts, a batch, other shapes."""
    contexts = [Case(model, context) for context in (64, 1024, 4096)]
    return [*contexts, Case(model, 1024, 8), Case(other, 1024)]


def verify(
    target: Target,
    cases: Sequence[Case],
    *,
    repeats: int = REPEATS,
    device: torch.device = CPU,
    say: Say = lambda text: None,
) -> Iterator[Prediction]:
    """Predict the steps for a target, measure them, and yield both."""
    random, model = RandomMemory(device), ""
    for case in cases:
        if case.model != model:
            random, model = RandomMemory(device), case.model  # frees the weights of the last model
        program = program_of(case, target, say)
        predicted = timing_at(program, target, case.context).makespan
        say(f"measuring {case.name}")
        steps = measure(program, case.context, repeats=repeats, random=random)
        yield Prediction(
            case,
            predicted,
            steps.step_us,
            steps.median_us,
            timing(program, steps.costs).makespan,
        )
