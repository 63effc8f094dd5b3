"""`python -m benchmarks serving`: a server's load, simulated and measured."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import tpcompile
from benchmarks.counts import positive
from benchmarks.report import write_json
from benchmarks.serve.prices import Recorder, from_model, from_schedules
from benchmarks.serve.runs import measure, simulate
from benchmarks.serve.trace import Load, arrivals
from tpcompile.errors import CompileError
from tpcompile.inspect.tables import table_text
from tpcompile.serving.plan import Limits
from tpcompile.vm.targets import target_of

_EXAMPLES = """\
examples:
  python -m benchmarks serving --simulate --target h200 --model preset:qwen3-8b
  python -m benchmarks serving --simulate --target mine.json --requests 1000000
  python -m benchmarks serving --requests 100     measured, and simulated with measured prices
"""


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    load = Load(
        options.requests or (10_000 if options.simulate else 60),
        options.per_s,
        options.prompt,
        options.new,
        options.prefix,
        seed=options.seed,
    )
    try:
        figures = _simulated(options, load) if options.simulate else _measured(options, load)
    except CompileError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if options.json:
        write_json(figures)
    else:
        sys.stdout.write(_table(figures))
    return 0


def _simulated(options: argparse.Namespace, load: Load) -> dict[str, Any]:
    """Simulate the load on a target."""
    console = Console(stderr=True)
    target = target_of(options.target)
    with console.status("scheduling") as status:
        prices = from_schedules(
            options.model, target, options.batch, options.longest, status.update
        )
        blocks = options.kv_tokens or options.batch * options.longest
        limits = Limits(-(-blocks // 32), 32, options.batch, max(512, options.batch + 128), 128)
        started = time.perf_counter()

        def progress(done: int) -> None:
            if done % 1000 == 0:
                status.update(f"simulated {done:,} of {load.requests:,} requests")

        outcome = simulate(arrivals(load, options.longest), limits, prices, progress)
    sys.stderr.write(f"simulated in {time.perf_counter() - started:.1f} s\n")
    return {"simulated": outcome.to_json()}


def _measured(options: argparse.Namespace, load: Load) -> dict[str, Any]:
    """Run the load on this machine, and simulate it with the prices of its steps."""
    console = Console(stderr=True)
    with console.status(f"compiling {options.model}") as status:
        model = tpcompile.compile(
            options.model,
            random_weights=0 if options.model.startswith("preset:") else None,
            max_seq_len=options.longest,
            max_batch=options.batch,
            dtype=options.dtype,
        )
        with model, tpcompile.Engine(model) as engine, torch.inference_mode():
            contexts = sorted({32, options.longest // 2 - 1})
            status.update("measuring steps")
            prices = from_model(engine, contexts)
            status.update(f"running {load.requests:,} requests")
            recorder = Recorder(model)
            real = measure(arrivals(load, options.longest), engine)
            limits = engine.scheduler.limits
    fitted, before = (
        simulate(arrivals(load, options.longest), limits, step_prices)
        for step_prices in (recorder.prices(), prices)
    )
    steps = [seconds for *_, seconds in (*recorder.decodes, *recorder.chunks)]
    return {
        "measured": real.to_json(),
        "simulated": fitted.to_json(),
        "prices of before": before.to_json(),
        "ratio_per_token": round(fitted.per_token / real.per_token, 4),
        "ratio_with_prices_of_before": round(before.per_token / real.per_token, 4),
        "engine_share": round(1 - sum(steps) / real.work, 4),
    }


def _table(figures: dict[str, Any]) -> str:
    sides = [name for name, values in figures.items() if isinstance(values, dict)]
    table = Table(title="serving", title_justify="left")
    table.add_column("", min_width=28)
    for side in sides:
        table.add_column(side, justify="right")
    for name in figures[sides[0]]:
        cells = [figures[side][name] for side in sides]
        if isinstance(cells[0], dict):
            for percent in cells[0]:
                row = [f"{cell[percent]:.4g}" for cell in cells]
                table.add_row(f"{name}, {percent} %", *row)
        else:
            table.add_row(name, *(f"{cell:,}" for cell in cells))
    text = table_text(table)
    for name, number in figures.items():
        if not isinstance(number, dict):
            text += f"{name.replace('_', ' ')}: {number}\n"
    return text + (_WORDS if "measured" in figures else "")


_WORDS = """\
ratio per token: the time per token, simulated over measured. The simulation has
the mean prices of the steps of the measured run; "prices of before" are those of
steps of the idle model before it. engine share: the time that steps of the engine
take besides the model's.
"""


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks serving",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="preset:qwen3-0.6b", metavar="MODEL", help="default: qwen3-0.6b")
    add("--simulate", action="store_true", help="do not run the model: simulate it on a target")
    add("--target", default="h200", metavar="T", help="target of --simulate; default: h200")
    add("--requests", type=positive, metavar="N", help="default: 10,000 simulated, 60 measured")
    add("--per-s", type=float, default=2.0, metavar="R", help="arrivals per second; default: 2")
    add("--prompt", type=positive, default=128, metavar="P", help="median prompt; default: 128")
    add("--new", type=positive, default=64, metavar="K", help="median of new tokens; default: 64")
    add("--prefix", type=int, default=0, metavar="P", help="shared tokens of a group; default: 0")
    add("--batch", type=positive, default=16, metavar="B", help="running requests; default: 16")
    add("--longest", type=positive, default=1024, metavar="L", help="longest sequence; 1,024")
    add("--kv-tokens", type=positive, metavar="T", help="tokens in the cache; default: B × L")
    add("--dtype", default="bfloat16", metavar="D", help="default: bfloat16")
    add("--seed", type=int, default=0, metavar="S", help="seed of the trace; default: 0")
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args(list(arguments))
