"""Decode steps on a GPU: numbers first, then bandwidth, then the sides in turn."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.counts import positive
from benchmarks.gpu.checks import check_bits, check_error
from benchmarks.gpu.kernels import Megakernel, Shape, TileGraph, bytes_of
from benchmarks.gpu.limits import limits_of
from benchmarks.gpu.peers import Compiled, Eager
from benchmarks.gpu.report import RESULTS, Report, Row
from benchmarks.report import write_json
from tpcompile.backends.measuring import RandomMemory
from tpcompile.errors import CompileError
from tpcompile.options import device_of
from tpcompile.presets import preset

MODELS = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-8b")
CONTEXTS = (128, 2048, 16384)
_EXAMPLES = """\
examples:
  python -m benchmarks gpu-decode
  python -m benchmarks gpu-decode --models qwen3-0.6b --contexts 128 --compiled 128
  python -m benchmarks gpu-decode --models qwen3-8b --contexts 128 --batches 1 8 64
  python -m benchmarks gpu-decode --device cpu --models tiny-qwen3 --contexts 8 \\
      --steps 2 --bursts 2 --repeats 2 --compiled --record /tmp/results

The result is also written to a new file in benchmarks/results. With --device cpu,
Triton's interpreter runs the kernels, so the times mean nothing: this checks the
benchmark. The exit status is 0, 1 if numbers are wrong, or 2 for bad input.
"""


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    try:
        device = device_of(options.device)
    except CompileError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    report = Report(_name(device), options.steps, limits_of(device))
    for name in options.models:
        _run(name, options, device, report)
    if options.json:
        write_json(report.to_json())
    else:
        sys.stdout.write(report.text())
    sys.stderr.write(f"wrote {report.record(options.record)}\n")
    return 0 if report.ok else 1


def _run(name: str, options: argparse.Namespace, device: torch.device, report: Report) -> None:
    """Check and time all sides of one model."""
    random = RandomMemory(device)
    eager = _eager(name, device)
    _say(f"{name}: checking numbers")
    report.checks.append(check_error(name, eager))
    shape = Shape(name, options.contexts[0], options.steps)
    report.checks += check_bits(shape, random, options.repeats)
    for context, batch in product(options.contexts, options.batches):
        shape = Shape(name, context, options.steps, batch)
        program = shape.program(device)
        makers: dict[str, Callable[[], Any]] = {
            Megakernel.name: partial(Megakernel, shape, program, random),
            TileGraph.name: partial(TileGraph, shape, program, random),
            Eager.name: partial(Eager, shape, eager),
        }
        if context in options.compiled and batch == 1:
            makers[Compiled.name] = partial(Compiled, shape, eager)
        _time(shape, makers, bytes_of(program, context, batch), options.bursts, report)


def _time(
    shape: Shape, makers: dict[str, Callable[[], Any]], size: int, bursts: int, report: Report
) -> None:
    """Run bursts of all sides in turn. A side that fails is reported, and the others go on."""
    sides, errors = {}, {}
    for name, make in makers.items():
        _say(f"{shape.model}, {shape.context:,} tokens, batch {shape.batch}: preparing {name}")
        try:
            sides[name] = make()
        except Exception as error:  # a peer may fail in many ways, and is then reported
            first = next(iter(str(error).splitlines()), "")
            errors[name] = f"{type(error).__name__}: {first}"
            _say(f"{name}: {errors[name]}")
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(bursts):
        for name, side in sides.items():
            times[name].append(side.burst())
    for name in makers:
        milliseconds, error = times.get(name, []), errors.get(name, "")
        report.rows.append(
            Row(shape.model, shape.context, shape.batch, name, size, milliseconds, error)
        )
    for side in sides.values():
        side.close()
    sides.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _eager(name: str, device: torch.device) -> Any:
    """Return Hugging Face's model with random weights, on the device."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**preset(name))
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def _name(device: torch.device) -> str:
    return "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks gpu-decode",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--device", default="cuda", help="cuda or cpu; default: cuda")
    add("--models", nargs="+", default=list(MODELS), metavar="NAME", help="presets to run")
    add("--contexts", nargs="+", type=positive, default=list(CONTEXTS), metavar="C",
        help="tokens in the cache; default: 128 2048 16384")  # fmt: skip
    add("--batches", nargs="+", type=positive, default=[1], metavar="B",
        help="sequences of a step; default: 1")  # fmt: skip
    add("--compiled", nargs="*", type=positive, default=[CONTEXTS[0]], metavar="C",
        help="contexts with torch.compile at batch 1, minutes each; default: 128")  # fmt: skip
    add("--steps", type=positive, default=32, help="steps per burst, at most 64; default: 32")
    add("--bursts", type=positive, default=9, help="bursts per side, at most 15; default: 9")
    add("--repeats", type=positive, default=100, help="runs that must agree; default: 100")
    add("--record", type=Path, default=RESULTS, metavar="DIR", help="where to write the result")
    add("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args(list(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
