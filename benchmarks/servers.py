"""`python -m benchmarks servers`: many requests at once, by tpcompile and its peers.

All sides read one checkpoint with random weights and continue the same prompts, greedily and to the
same length. They run in turn; while one runs, the processes of all others are stopped. The tokens
of each side are checked: by the model in fp32, each must be almost the best one after the tokens
before it. benchmarks/README.md says how to install the peers.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

import torch
from rich.console import Console

from benchmarks.bandwidth import ReadLoop
from benchmarks.checkpoint import write_checkpoint
from benchmarks.counts import not_negative, positive
from benchmarks.decode_options import engine_specs, peer_python
from benchmarks.peers.kinds import Continued
from benchmarks.peers.side import NotInstalledError, Side, SideError, SideSpec
from benchmarks.peers.words import save_tokenizer
from benchmarks.report import write_json
from benchmarks.serve.agreement import gaps
from benchmarks.serve.figures import ENGINE, SERVER, Case, Measured, Round, show

_KINDS = {
    ENGINE: "tpcompile-engine",
    SERVER: "tpcompile-serve",
    "Hugging Face generate_batch": "hugging-face-batch",
    "transformers serve": "hugging-face-serve",
    "llama.cpp server": "llama-server",
    "OpenVINO GenAI": "openvino-genai",
    "vLLM": "vllm",
}
"""The kind of each side."""
_PYTHONS = (*list(_KINDS.values())[3:], "openvino-export")
"""Kinds of sides that may run under other interpreters, and the conversion for OpenVINO."""
_READ = 1 << 30
_TAIL = 8
"""The tokens of a prompt after a shared prefix."""
_EXAMPLES = """\
examples:
  python -m benchmarks servers
  python -m benchmarks servers --sides tpcompile generate_batch --requests 8
  python -m benchmarks servers --directory build/checkpoint \\
      --peer-python openvino-genai=build/openvino/bin/python
"""


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    progress = Console(stderr=True)
    case = Case(options.requests, options.prompt, options.new, options.prefix)
    measured = Measured(options.model, options.threads, case)
    with _checkpoint(options, progress) as directory:
        vocabulary = json.loads((directory / "config.json").read_text())["vocab_size"]
        prompts: list[list[int]] = []
        with ExitStack() as stack:
            sides = Sides(measured, stack, progress)
            longest = max(options.prompt, options.prefix + _TAIL) + options.new
            for spec in engine_specs(options, _KINDS, longest):
                sides.start(spec, directory)
            for number in range(options.rounds + 1):
                progress.print(f"round {number}" if number else "warming up")
                prompts = _prompts(Random(number), case.requests, case.prompt, vocabulary)
                bandwidth = sides.bandwidth()
                results = sides.serve(prompts, case.new)
                if number:
                    measured.rounds.append(Round(bandwidth, results))
            for number in range(options.rounds if case.prefix else 0):
                progress.print(f"shared prefix, round {number + 1}")
                sides.share(Random(f"prefix {number}"), vocabulary)
        progress.print("checking the tokens")
        last = measured.rounds[-1].results
        measured.gaps, measured.allowed = gaps(directory, prompts, last, options.threads)
    if options.json:
        write_json(measured.to_json())
    else:
        show(measured)
    return 0 if measured.ok else 1


class Sides:
    """All sides that have started. Only one of them runs at a time."""

    def __init__(self, measured: Measured, stack: ExitStack, progress: Console) -> None:
        self._found, self._stack, self._progress = measured, stack, progress
        self._sides: dict[str, Side] = {}
        self._read = ReadLoop(_READ)
        self._turned = True

    def start(self, spec: SideSpec, directory: Path) -> None:
        """Start a side, and stop its processes until it is its turn."""
        self._progress.print(f"loading {spec.name}")
        side = self._stack.enter_context(Side(spec, directory, self._found.case.requests))
        try:
            side.ready()
        except SideError as error:
            self._lose(spec.name, side, error)
        else:
            side.pause()
            self._sides[spec.name] = side

    def bandwidth(self) -> float:
        """Return the read bandwidth of the machine now."""
        return self._read.bandwidth()

    def serve(self, prompts: Sequence[Sequence[int]], new: int) -> dict[str, list[Continued]]:
        """Let each side continue all prompts, every other time in the opposite order."""
        results = {}
        self._turned = not self._turned
        order = reversed(self._sides.items()) if self._turned else self._sides.items()
        for name, side in list(order):
            side.resume()
            try:
                results[name] = side.serve(prompts, new)
                side.pause()
            except SideError as error:
                self._lose(name, self._sides.pop(name), error)
        return {name: results[name] for name in self._sides}

    def share(self, dice: Random, vocabulary: int) -> None:
        """Send two prompts with the same prefix, one after the other."""
        (prefix,) = _prompts(dice, 1, self._found.case.prefix, vocabulary)
        for place, tail in enumerate(_prompts(dice, 2, _TAIL, vocabulary)):
            for name, ((_, times),) in self.serve([[*prefix, *tail]], 2).items():
                self._found.prefixes.setdefault(name, ([], []))[place].append(times[0])

    def _lose(self, name: str, side: Side, error: SideError) -> None:
        side.close()
        missing = isinstance(error, NotInstalledError)
        (self._found.not_installed if missing else self._found.failed)[name] = str(error)


def _prompts(dice: Random, count: int, length: int, vocabulary: int) -> list[list[int]]:
    return [[dice.randrange(vocabulary) for _ in range(length)] for _ in range(count)]


@contextmanager
def _checkpoint(options: argparse.Namespace, progress: Console) -> Iterator[Path]:
    """Yield the directory of the checkpoint, with a tokenizer."""
    with tempfile.TemporaryDirectory(prefix="tpcompile-benchmark-") as temporary:
        directory = options.directory or Path(temporary)
        config = directory / "config.json"
        if not config.exists():
            directory.mkdir(parents=True, exist_ok=True)
            progress.print(f"writing random weights of {options.model}")
            write_checkpoint(directory, options.model, dtype=torch.bfloat16)
        if not (directory / "tokenizer.json").exists():
            save_tokenizer(directory, json.loads(config.read_text())["vocab_size"])
        yield directory


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks servers",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="qwen3-0.6b", metavar="PRESET", help="default: qwen3-0.6b")
    add("--requests", type=positive, default=16, metavar="N", help="at the same time; default: 16")
    add("--prompt", type=positive, default=128, metavar="P", help="tokens; default: 128")
    add("--new", type=positive, default=64, metavar="K", help="new tokens; default: 64")
    add("--prefix", type=not_negative, default=1024, metavar="P",
        help="tokens of a shared prefix, 0 for no such test; default: 1,024")  # fmt: skip
    add("--rounds", type=positive, default=3, metavar="N", help="default: 3")
    add("--threads", type=positive, default=os.cpu_count() or 1, metavar="T",
        help="threads of each side; default: one per core")  # fmt: skip
    add("--sides", nargs="+", metavar="NAME", help="only sides whose name contains a NAME")
    add("--directory", type=Path, metavar="D",
        help="keep the checkpoint and its conversions here for later runs")  # fmt: skip
    help = f"run a side under another interpreter; NAME is one of {', '.join(_PYTHONS)}"
    add("--peer-python", type=peer_python(_PYTHONS), action="append", default=[],
        metavar="NAME=PYTHON", help=help)  # fmt: skip
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args(list(arguments))
