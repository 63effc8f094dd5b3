"""Constants fitted to synthetic times are those that made the times."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.backends.reference.stepping import Case
from tpcompile.errors import UsageError
from tpcompile.vm.program.instruction import StepInstruction
from tpcompile.vm.schedule.fitting import Sample, fit, samples_of
from tpcompile.vm.targets import TARGETS, Target

KNOWN = replace(
    TARGETS["cpu"],
    bytes_per_us=21_500.0,
    macs_per_us=150_000.0,
    instruction_us=1.25,
    value_us=0.0015,
    exchange_us=1.25,
    link_bytes_per_us=21_500.0,
)


def samples(target: Target = KNOWN) -> list[Sample]:
    """Loads of many sizes with one sequence and with a few; with sixteen, some compute longer."""
    loads = [Sample("attention", 32_768 * n, 32_768 * n, 128 * n, 0.0) for n in (1, 4, 16)]
    loads += [Sample("reduce", 4_096, 0, 1_024, 0.0), Sample("argmax", 16, 0, 0, 0.0)]
    for batch in (1, 4, 16):
        for columns, rows in ((1024, 1024), (2048, 512), (1024, 75_968), (3072, 512)):
            weights = columns * rows
            values = batch * (columns + rows)
            loads.append(Sample("linear", 2 * weights, batch * weights, values, 0.0))
    return [replace(sample, us=sample.predicted(target)) for sample in loads]


CONSTANTS = ("bytes_per_us", "macs_per_us", "instruction_us", "value_us", "exchange_us")


def test_known_constants_are_found() -> None:
    fitted = fit(samples(), TARGETS["cpu"])
    for name in CONSTANTS:
        constant = getattr(fitted.target, name)
        assert constant == pytest.approx(getattr(KNOWN, name), rel=0.05), name
    assert fitted.error < 0.01
    assert (fitted.target.name, fitted.target.workers) == ("cpu", KNOWN.workers)


@pytest.mark.parametrize(("macs", "least"), [(1e6, 0.95e6), (1e9, 1.5e6)])
def test_another_machine(macs: float, least: float) -> None:
    """If no sample computes longer than it loads, the rate is the one that samples reach."""
    fast = replace(KNOWN, workers=8, bytes_per_us=2e5, macs_per_us=macs, instruction_us=0.4)
    fitted = fit(samples(fast), replace(TARGETS["cpu"], workers=8))
    assert fitted.target.bytes_per_us == pytest.approx(2e5, rel=0.05)
    assert least < fitted.target.macs_per_us < min(1.05 * macs, 1.7e6)
    assert fitted.error < 0.01


def test_one_disturbed_sample_changes_little() -> None:
    """As when another process runs during the longest instruction."""
    every = samples()
    longest = max(range(len(every)), key=lambda n: every[n].us)
    every[longest] = replace(every[longest], us=7 * every[longest].us)
    target = fit(every, TARGETS["cpu"]).target
    assert target.bytes_per_us == pytest.approx(KNOWN.bytes_per_us, rel=0.05)


def test_noise_of_a_few_percent() -> None:
    dice = random.Random(1)
    noisy = [replace(sample, us=sample.us * dice.uniform(0.97, 1.03)) for sample in samples()]
    fitted = fit(noisy, TARGETS["cpu"])
    assert fitted.error < 0.05
    for sample in samples():
        if sample.name == "linear":
            assert sample.predicted(fitted.target) == pytest.approx(sample.us, rel=0.06)


def test_samples_without_loads_are_refused() -> None:
    with pytest.raises(UsageError, match="samples that load bytes"):
        fit([Sample("argmax", 0, 0, 0, 1.0)], TARGETS["cpu"])


def test_without_arithmetic_its_rate_stays() -> None:
    loads = [replace(sample, work=0) for sample in samples()]
    fitted = fit(loads, TARGETS["cpu"])
    assert fitted.target.macs_per_us == pytest.approx(TARGETS["cpu"].macs_per_us)


def test_samples_of_a_program() -> None:
    """A sample predicts what the cost of its instructions is."""
    program = Case("tiny-qwen3", lengths=(5, 5), workers=2).program
    steps = [step for step in program.instructions if isinstance(step, StepInstruction)]
    program_samples = samples_of(program, [step.cost(KNOWN) for step in steps], KNOWN)
    assert sum(sample.share for sample in program_samples) == pytest.approx(1)
    assert len(program_samples) < len(steps)
    for sample in program_samples:
        assert sample.predicted(KNOWN) == pytest.approx(sample.us)
    assert {sample.name for sample in program_samples} == {step.name for step in steps}


def test_values_of_a_batch() -> None:
    """They grow with the batch, and take time only on targets that say so."""
    for name in ("norm_qkv_rope_append", "norm_gate_up_swiglu", "linear_residual", "norm_lm_head"):
        single, four = (
            next(
                i
                for i in Case("tiny-qwen3", lengths=(5,) * batch, workers=2).program.instructions
                if isinstance(i, StepInstruction) and i.name == name
            )
            for batch in (1, 4)
        )
        assert 4 * single.values == four.values > 0
        slow, fast = (
            replace(KNOWN, macs_per_us=1e12),
            replace(KNOWN, macs_per_us=1e12, value_us=0.0),
        )
        assert single.cost(fast) == four.cost(fast)
        assert four.cost(slow) - single.cost(slow) == pytest.approx(3 * single.values * 0.0015)
