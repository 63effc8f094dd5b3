"""Decode steps and prompts of a mixture of experts with random weights, made in their format.

Some layers and a small vocabulary are enough for the speed of a layer, and all of them show whether
a model fits. The read loop runs before and after each turn of steps. A step reads the weights that
its instructions are expected to read: all of them but experts, and the number of experts that a
batch is expected to choose.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import tpcompile
from benchmarks.bandwidth import ReadLoop
from benchmarks.memory import MemoryWatch
from benchmarks.report import write_json
from tpcompile.backends.devices import machine_of
from tpcompile.backends.rotation import CPU
from tpcompile.frontend import config_of
from tpcompile.scheduling import schedule
from tpcompile.vm.program.instruction import WeightInstruction

_PROMPT = 64
"""The tokens before the first step."""
_READ = 1 << 29
_GENERATE: dict[str, Any] = {"do_sample": False, "eos_token_id": None}


@dataclass(frozen=True)
class Result:
    """The measurements of one model: medians of turns."""

    weights: str
    tp: int
    batch: int
    load_s: float
    peak_gb: float
    step_mb: float
    step_ms: float
    read_gb_s: float
    share: float
    """The time in which the loop reads the bytes of a step, over the time of a step."""
    prompt_ms: dict[str, float]
    """The time of a prompt on tpcompile, and on Hugging Face's loop and grouped product."""


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    config = config_of(f"preset:{options.model}")
    if options.layers:
        config.num_hidden_layers = options.layers
    if options.vocabulary:
        config.vocab_size = options.vocabulary
        config.bos_token_id = config.eos_token_id = None
    results = list(_results(config, options))
    if options.json:
        write_json([asdict(result) for result in results])
        return 0
    table = Table("weights", "tp", "batch", "load s", "peak GB", "MB", "ms", "of read", "prompt ms")
    for result in results:
        prompts = ", ".join(f"{side} {ms:.0f}" for side, ms in result.prompt_ms.items())
        table.add_row(
            *(
                result.weights,
                str(result.tp),
                str(result.batch),
                f"{result.load_s:.1f}",
                f"{result.peak_gb:.2f}",
            ),
            *(f"{result.step_mb:.0f}", f"{result.step_ms:.2f}", f"{result.share:.2f}", prompts),
        )
    Console().print(table)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks experts", description=__doc__)
    add = parser.add_argument
    add("model", nargs="?", default="qwen3-30b-a3b", help="a preset; default: %(default)s")
    add("--layers", type=int, default=4, help="0 for all of them; default: %(default)s")
    add("--vocabulary", type=int, default=8192, help="0 for the preset's; default: %(default)s")
    add("--weights", nargs="+", default=["bf16", "int8", "int4"], help="default: bf16 int8 int4")
    add("--tp", nargs="+", type=int, default=[1], help="default: 1")
    add("--batches", nargs="+", type=int, default=[1], help="default: 1")
    add("--steps", type=int, default=64, help="steps of a turn; default: %(default)s")
    add("--turns", type=int, default=5, help="default: %(default)s")
    add("--prompt", type=int, default=0, help="also measure a prompt of so many tokens")
    add("--json", action="store_true", help="print all results as JSON")
    return parser


def _results(config: Any, options: argparse.Namespace) -> Iterator[Result]:
    loop = ReadLoop(_READ)
    for weights in options.weights:
        for tp in options.tp:
            for batch in options.batches:
                yield _measured(config, weights, tp, batch, options, loop)


def _measured(
    config: Any, weights: str, tp: int, batch: int, options: argparse.Namespace, loop: ReadLoop
) -> Result:
    few = None if weights == "bf16" else weights
    length = max(_PROMPT + options.steps + 1, options.prompt + 1)
    read = _bytes(config, few, tp, batch, length)
    ids = torch.randint(0, config.vocab_size, (batch, _PROMPT))
    started = time.perf_counter()
    with (
        MemoryWatch(os.getpid()) as watch,
        tpcompile.compile(
            config, tp, random_weights=0, max_seq_len=length, max_batch=batch, weights=few,
            dtype=torch.bfloat16, backend="native",
        ) as model,
    ):  # fmt: skip
        load = time.perf_counter() - started
        model.generate(ids, max_new_tokens=2, **_GENERATE)  # makes the program
        turns = [_turn(model, ids, options.steps, read, loop) for _ in range(options.turns)]
        prompts = _prompts(model, config, few, options)
    seconds, bandwidths, shares = zip(*turns, strict=True)
    peak = (sum(watch.peaks.values()) - loop.size) / 1e9
    return Result(
        *(weights, tp, batch, load, peak, read / 1e6, median(seconds) * 1e3),
        *(median(bandwidths) / 1e9, median(shares), prompts),
    )


def _bytes(config: Any, weights: str | None, tp: int, batch: int, length: int) -> int:
    """Return the bytes of weights that a step is expected to read."""
    scheduled = schedule(
        config, tp=tp, target=machine_of(CPU), dtype=torch.bfloat16, batch=batch, context=_PROMPT,
        max_seq_len=length, weights=weights,
    )  # fmt: skip
    return sum(
        instruction.traffic
        for instruction in scheduled.program.instructions
        if isinstance(instruction, WeightInstruction)
    )


def _turn(
    model: Any, ids: torch.Tensor, steps: int, read: int, loop: ReadLoop
) -> tuple[float, float, float]:
    """Return the seconds of a step, the bandwidth of the loop, and the share."""
    before = median(loop.bandwidth() for _ in range(3))
    times = []
    for tokens in (1, steps + 1):
        started = time.perf_counter()
        model.generate(ids, max_new_tokens=tokens, **_GENERATE)
        times.append(time.perf_counter() - started)
    bandwidth = (before + median(loop.bandwidth() for _ in range(3))) / 2
    seconds = (times[1] - times[0]) / steps
    return seconds, bandwidth, read / bandwidth / seconds


def _prompts(
    model: Any, config: Any, weights: str | None, options: argparse.Namespace
) -> dict[str, float]:
    """Return the milliseconds of a prompt, beside eager's if weights are the same."""
    if not options.prompt:
        return {}
    ids = torch.randint(0, config.vocab_size, (1, options.prompt))
    sides = {"tpcompile": lambda: model.generate(ids, max_new_tokens=1, **_GENERATE)}
    if weights is None:
        eager = _eager(config)

        def run(implementation: str) -> Any:
            eager.set_experts_implementation(implementation)
            with torch.inference_mode():
                return eager(ids, logits_to_keep=1)

        sides |= {name: lambda name=name: run(name) for name in ("eager", "grouped_mm")}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(options.turns + 1):
        for name, side in sides.items():
            started = time.perf_counter()
            side()
            if turn:
                times[name].append((time.perf_counter() - started) * 1e3)
    return {name: median(milliseconds) for name, milliseconds in times.items()}


def _eager(config: Any) -> Any:
    """Return a Hugging Face model with random weights."""
    from transformers import AutoModelForCausalLM

    copied = type(config).from_dict(config.to_dict())
    return AutoModelForCausalLM.from_config(copied, dtype=torch.bfloat16).eval()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
