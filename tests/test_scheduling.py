"""Tests of `tpcompile.schedule`, which schedules a decode step from Python."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from fractions import Fraction
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import tpcompile
from tpcompile.cli import main
from tpcompile.errors import UsageError, VerifyError
from tpcompile.presets import preset
from tpcompile.scheduling import choose
from tpcompile.vm.program.text import parse_program
from tpcompile.vm.targets import TARGETS

pytestmark = pytest.mark.usefixtures("captured_once")

SMALL: dict[str, Any] = {"tp": 2, "target": "cpu", "workers": 3, "max_seq_len": 64}


def test_a_schedule_is_that_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    step = tpcompile.schedule("preset:tiny-qwen3", policy="zigzag", spans=2, **SMALL)
    options = "--tp 2 --target cpu --workers 3 --max-seq-len 64 --policy zigzag --spans 2 --text"
    assert main(["schedule", "preset:tiny-qwen3", *options.split()]) == 0
    assert step.text() == capsys.readouterr().out
    assert step.verified is True
    assert parse_program(step.text()) == step.program


def test_a_schedule_is_shown() -> None:
    step = tpcompile.schedule("preset:tiny-qwen3", batch=2, context=32, lowering="rows", **SMALL)
    assert ElementTree.fromstring(step.svg()).tag.endswith("svg")
    assert json.loads(step.trace())["traceEvents"]
    report = step.report.to_json()
    assert report["model"] == "preset:tiny-qwen3" and report["verified"] is True
    assert {name: report[name] for name in ("tp", "workers", "batch", "context", "lowering")} == {
        "tp": 2,
        "workers": 3,
        "batch": 2,
        "context": 32,
        "lowering": "rows",
    }


def test_a_gpu_measures_the_target_of_a_gpu() -> None:
    """It may also be like the GPU that is here: the kernel is refused if it needs more SMs."""
    gpu = torch.device("cuda")
    assert choose(target="h100", measured=gpu).target is TARGETS["h100"]
    with pytest.raises(UsageError, match=r"machine's GPU.*Found target='cpu'.*such as target='h1"):
        choose(target="cpu", measured=gpu)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "h201"}, "Did you mean h200"),
        ({"policy": "zigzig"}, "Did you mean zigzag"),
        ({"lowering": "row"}, "Did you mean rows"),
        ({"context": 99, "max_seq_len": 64}, "context must be at most max_seq_len, got 99 and 64"),
        ({"spans": 2, "pipeline": "decode"}, r"decode\{spans=4"),
        ({"tp": 0}, "tp must be a positive int, got 0"),
        ({"tp": "2"}, "tp must be a positive int, got '2'"),
        ({"spans": 0}, "spans must be a positive int, got 0"),
        ({"context": 0}, "context must be a positive int, got 0"),
        ({"policy": ""}, "Unknown policy ''"),
        ({"tp": 2, "pipeline": "canonicalize"}, "does not shard the graph, which tp=2 requires"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    """Unknown names are refused before a model is captured."""
    with pytest.raises(UsageError, match=message):
        tpcompile.schedule("no-such-directory", **options)


def test_a_program_with_faults_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpcompile import scheduling

    def broken(*args: Any) -> Any:
        correct = scheduled(*args)
        waits = tuple(() for _ in correct.program.waits)
        faults = tuple(check_program(replace(correct.program, waits=waits)))
        return replace(correct, faults=faults, timing=None)

    from dataclasses import replace

    from tpcompile.vm.proof.verify import check_program
    from tpcompile.vm.schedule.scheduled import scheduled

    monkeypatch.setattr(scheduling, "scheduled", broken)
    with pytest.raises(VerifyError):
        tpcompile.schedule("preset:tiny-qwen3", **SMALL)


def test_compile_takes_the_same_choices() -> None:
    options: dict[str, Any] = {"random_weights": 0, "max_seq_len": 64}
    choices = {"target": "cpu", "policy": "wave", "lowering": "rows", "spans": 2}
    with tpcompile.compile("preset:tiny-qwen3", backend="reference", **choices, **options) as model:
        schedule = model.program.schedule.to_json()
        assert schedule["policy"] == "wave"
        names = {instruction.name for instruction in model.program.program.instructions}
        assert "norm_qkv_rows" in names
        values = next(b for b in model.program.program.buffers if b.name == "partial_values")
        assert values.shape[2] == 2
    with tpcompile.compile(
        "preset:tiny-qwen3", backend="reference", target="h200", **options
    ) as gpu_model:
        spans = next(
            b for b in gpu_model.program.program.buffers if b.name == "partial_values"
        ).shape[2]
        assert spans == 1, "a worker of a GPU attends to 128 tokens at a time, in any span"
    for name, value in choices.items():
        with pytest.raises(UsageError, match="Modules have no target, policy"):
            tpcompile.compile("preset:tiny-qwen3", backend="torch", **{name: value}, **options)
    with pytest.raises(UsageError, match="Did you mean wave"):
        tpcompile.compile("preset:tiny-qwen3", backend="reference", policy="wav", **options)


def test_traffic_of_few_bits() -> None:
    """Integers and scales are counted to the byte; the numbers of weights are written down here."""
    step = tpcompile.schedule(
        "preset:qwen3-0.6b", target="cpu", tp=3, context=512, weights="int4:64"
    )
    traffic: dict[str, int] = {}
    for instruction in step.program.instructions:
        traffic[instruction.name] = traffic.get(instruction.name, 0) + instruction.traffic  # type: ignore[attr-defined]
    layers, hidden, attention, ffn, vocabulary = 28, 1024, 2048, 3072, 151936
    four, eight = Fraction(4, 8) + Fraction(2, 64), 1 + Fraction(2, 64)
    assert traffic["linear_terms"] == layers * hidden * (attention + ffn) * four
    assert traffic["norm_gate_up_swiglu"] == layers * hidden * 2 * ffn * four
    assert traffic["norm_lm_head"] == vocabulary * hidden * eight


@pytest.mark.parametrize("layers", [6, pytest.param(36, marks=pytest.mark.slow)])
def test_a_batch_on_a_gpu_reads_each_weight_once(layers: int) -> None:
    """A simulated step of 64 sequences of 190 tokens takes at most 1.4 times as long as one of 1.

    Reading their keys and values is 0.11 of that, if the model has all of its layers.
    """
    config = AutoConfig.for_model(**{**preset("qwen3-8b"), "num_hidden_layers": layers})
    single, many = (
        tpcompile.schedule(
            config, target="h200", batch=batch, context=190, max_seq_len=1024
        ).report.to_json()["makespan_us"]
        for batch in (1, 64)
    )
    assert many <= 1.4 * single
