"""`python -m benchmarks contention`: decoding beside other programs, on fewer cores, in a quota.

Each side decodes blocks of steps in pairs: alone, and in a condition. A pair counts if a loop that
only reads memory is as fast after it as before it; otherwise it is measured again. A figure is the
median of the pairs' ratios. benchmarks/README.md says how to install the peers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.checkpoint import kept_checkpoint
from benchmarks.contend.conditions import (
    BY_NAME,
    CONDITIONS,
    CORES,
    LAUNCHES,
    LAUNCHES_TWO,
    SIDES,
    TOKENS,
    TOKENS_TWO,
)
from benchmarks.contend.disturbances import restricted
from benchmarks.contend.figures import Measured, from_json, merged, to_json
from benchmarks.contend.pairs import Contention, Work
from benchmarks.contend.report import show
from benchmarks.counts import positive
from benchmarks.decode import processor
from benchmarks.decode_measured import LLAMA, MODEL, OPENVINO
from benchmarks.decode_options import PEER_KINDS, peer_python
from benchmarks.peers.side import ROOT, SideSpec
from benchmarks.report import write_json

_CHECKPOINTS = ROOT / "build" / "checkpoints"
_EXAMPLES = """\
examples:
  python -m benchmarks contention
  python -m benchmarks contention --sides tp=1 --conditions nice-0 one-core --pairs 3
  python -m benchmarks contention --sides OpenVINO llama --json > peers.json \\
      --peer-python openvino=build/openvino/bin/python \\
      --peer-python llama.cpp=build/llama/bin/python
  python -m benchmarks contention --from ours.json peers.json
"""


def main(arguments: Sequence[str]) -> int:
    """Print the table. Return 1 if a limit is missed, a side failed, or its tokens are wrong."""
    options = _options(arguments)
    measured = options.earlier or measure(options, Console(stderr=True))
    if options.json:
        write_json(to_json(measured))
    else:
        show(measured, Console(width=100, highlight=False))
    return 0 if measured.ok else 1


def measure(options: argparse.Namespace, progress: Console) -> Measured:
    """Load the sides and measure them in each condition, on the first cores of this process."""
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    measured = Measured(options.model, len(cores), processor())
    directory = options.directory / f"{options.model}-bf16"
    checkpoint = kept_checkpoint(directory, options.model, torch.bfloat16)
    work = Work(options.context, options.steps, options.pairs)
    with restricted([os.getpid()], cores), ExitStack() as stack:
        contention = Contention(checkpoint, measured, work, progress)
        contention.start(options.chosen, stack)
        for name in options.conditions:
            contention.measure(BY_NAME[name])
    contention.judge()
    return measured


def specs(threads: int, pythons: dict[str, str]) -> list[SideSpec]:
    """Return all sides. Those of tpcompile choose their threads themselves."""
    of = dict.fromkeys(PEER_KINDS, sys.executable) | {"openvino-export": ""} | pythons
    sides = [
        SideSpec(LAUNCHES, "tpcompile-launches", 1, threads),
        SideSpec(TOKENS, "tpcompile-tokens", 1, threads),
        SideSpec(LAUNCHES_TWO, "tpcompile-launches", 2, threads),
        SideSpec(TOKENS_TWO, "tpcompile-tokens", 2, threads),
        SideSpec(OPENVINO, "openvino", 1, threads, of["openvino"], of["openvino-export"]),
        SideSpec(LLAMA, "llama.cpp", 1, threads, of["llama.cpp"]),
    ]
    assert tuple(spec.name for spec in sides) == SIDES
    return sides


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks contention",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    help = f"model to measure, a preset of Qwen3; limits apply to {MODEL}"
    add("--model", default=MODEL, metavar="PRESET", help=help)
    add("--context", type=positive, default=64, metavar="N", help="tokens before the first step")
    add("--steps", type=positive, default=40, metavar="N", help="steps of a block; default: 40")
    add("--pairs", type=positive, default=5, metavar="N", help="pairs that count; default: 5")
    names = [condition.name for condition in CONDITIONS]
    add("--conditions", nargs="+", choices=names, default=names, metavar="NAME",
        help=f"default: {' '.join(names)}")  # fmt: skip
    add("--sides", nargs="+", metavar="NAME", help="only sides whose name contains a NAME")
    add("--directory", type=Path, default=_CHECKPOINTS, metavar="D",
        help="keep checkpoints and their conversions here; default: build/checkpoints")  # fmt: skip
    help = f"run a peer under another interpreter; NAME is one of {', '.join(PEER_KINDS)}"
    add("--peer-python", type=peer_python(PEER_KINDS), action="append", default=[],
        metavar="NAME=PYTHON", help=help)  # fmt: skip
    add("--json", action="store_true", help="print JSON instead of the table")
    help = "show results of earlier runs with --json as one, and measure nothing"
    add("--from", dest="files", type=Path, nargs="+", metavar="FILE", help=help)
    options = parser.parse_args(list(arguments))
    every = specs(min(CORES, len(os.sched_getaffinity(0))), dict(options.peer_python))
    words = options.sides
    options.chosen = [s for s in every if not words or any(word in s.name for word in words)]
    if not options.chosen:
        parser.error(f"--sides matches no side; the sides are {', '.join(s.name for s in every)}")
    try:
        options.earlier = _earlier(options.files) if options.files else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"argument --from: the files must hold results of --json: {error!r}")
    return options


def _earlier(files: Sequence[Path]) -> Measured:
    return merged([from_json(json.loads(file.read_text())) for file in files])
