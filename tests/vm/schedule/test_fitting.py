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
    found = [Sample("attention", 32_768 * n, 32_768 * n, 128 * n, 0.0) for n in (1, 4, 16)]
    found += [Sample("reduce", 4_096, 0, 1_024, 0.0), Sample("argmax", 16, 0, 0, 0.0)]
    for batch in (1, 4, 16):
        for columns, rows in ((1024, 1024), (2048, 512), (1024, 75_968), (3072, 512)):
            weights = columns * rows
            values = batch * (columns + rows)
            found.append(Sample("linear", 2 * weights, batch * weights, values, 0.0))
    return [replace(one, us=one.predicted(target)) for one in found]


CONSTANTS = ("bytes_per_us", "macs_per_us", "instruction_us", "value_us", "exchange_us")


def test_known_constants_are_found() -> None:
    found = fit(samples(), TARGETS["cpu"])
    for name in CONSTANTS:
        own = getattr(found.target, name)
        assert own == pytest.approx(getattr(KNOWN, name), rel=0.05), name
    assert found.error < 0.01
    assert (found.target.name, found.target.workers) == ("cpu", KNOWN.workers)


@pytest.mark.parametrize(("macs", "least"), [(1e6, 0.95e6), (1e9, 1.5e6)])
def test_another_machine(macs: float, least: float) -> None:
    """If no sample computes longer than it loads, the rate is the one that samples reach."""
    fast = replace(KNOWN, workers=8, bytes_per_us=2e5, macs_per_us=macs, instruction_us=0.4)
    found = fit(samples(fast), replace(TARGETS["cpu"], workers=8))
    assert found.target.bytes_per_us == pytest.approx(2e5, rel=0.05)
    assert least < found.target.macs_per_us < min(1.05 * macs, 1.7e6)
    assert found.error < 0.01


def test_one_disturbed_sample_changes_little() -> None:
    """As when another process runs during the longest instruction."""
    every = samples()
    longest = max(range(len(every)), key=lambda n: every[n].us)
    every[longest] = replace(every[longest], us=7 * every[longest].us)
    found = fit(every, TARGETS["cpu"]).target
    assert found.bytes_per_us == pytest.approx(KNOWN.bytes_per_us, rel=0.05)


def test_noise_of_a_few_percent() -> None:
    dice = random.Random(1)
    noisy = [replace(one, us=one.us * dice.uniform(0.97, 1.03)) for one in samples()]
    found = fit(noisy, TARGETS["cpu"])
    assert found.error < 0.05
    for one in samples():
        if one.name == "linear":
            assert one.predicted(found.target) == pytest.approx(one.us, rel=0.06)


def test_samples_without_loads_are_refused() -> None:
    with pytest.raises(UsageError, match="samples that load bytes"):
        fit([Sample("argmax", 0, 0, 0, 1.0)], TARGETS["cpu"])


def test_samples_of_a_program() -> None:
    """A sample predicts what the cost of its instructions is."""
    program = Case("tiny-qwen3", lengths=(5, 5), workers=2).program
    steps = [one for one in program.instructions if isinstance(one, StepInstruction)]
    found = samples_of(program, [one.cost(KNOWN) for one in steps], KNOWN)
    assert sum(one.share for one in found) == pytest.approx(1)
    assert len(found) < len(steps)
    for one in found:
        assert one.predicted(KNOWN) == pytest.approx(one.us)
    assert {one.name for one in found} == {one.name for one in steps}


def test_values_of_a_batch() -> None:
    """They grow with the batch, and take time only on targets that say so."""
    for name in ("norm_qkv_rope_append", "norm_gate_up_swiglu", "linear_residual", "norm_lm_head"):
        one, four = (
            next(
                i
                for i in Case("tiny-qwen3", lengths=(5,) * batch, workers=2).program.instructions
                if isinstance(i, StepInstruction) and i.name == name
            )
            for batch in (1, 4)
        )
        assert 4 * one.values == four.values > 0
        slow, fast = (
            replace(KNOWN, macs_per_us=1e12),
            replace(KNOWN, macs_per_us=1e12, value_us=0.0),
        )
        assert one.cost(fast) == four.cost(fast)
        assert four.cost(slow) - one.cost(slow) == pytest.approx(3 * one.values * 0.0015)
