"""The sides and the options of `python -m benchmarks decode`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path

from benchmarks.counts import not_negative, positive
from benchmarks.decode_measured import (
    COMPILED,
    DTYPES,
    EAGER,
    HUGGING_FACE_TP,
    LLAMA,
    MODEL,
    NATIVE,
    NATIVE_TWO,
    ONE,
    OPENVINO,
    TWO,
    Measured,
    from_json,
)
from benchmarks.peers.kinds import integers_of
from benchmarks.peers.side import SideSpec
from tpcompile.dtypes import ACTIVATIONS, HEADS
from tpcompile.errors import CompileError, UsageError
from tpcompile.frontend import config_of
from tpcompile.gguf import is_gguf, open_gguf
from tpcompile.options import scheme_of

PREFILL = 512
PEER_KINDS = ("openvino", "llama.cpp", "openvino-export")
"""Kinds of sides that may run under other interpreters, and the conversion for OpenVINO."""

_OF_CHECKPOINTS = ("model", "dtypes", "weights", "head", "directory")
"""The options that do not apply to given models."""
LLAMA_TYPES = {"int8": "Q8_0", "int4": "Q4_0"}
ROUNDED = dict(zip(ACTIVATIONS, ("", " a8"), strict=True))
"""How names of sides say what activations are."""


def specs(
    threads: int,
    pythons: Mapping[str, str] | None = None,
    weights: Sequence[str] = (),
    head: str | None = None,
    activations: Sequence[str] = ACTIVATIONS[:1],
) -> list[SideSpec]:
    """Return all sides. Each has the same total number of threads, which its ranks share.

    `weights` are formats in which tpcompile runs too, with each of these activations, beside peers
    with as many bits.
    """
    of = dict.fromkeys(PEER_KINDS[:2], sys.executable) | dict(pythons or {})
    a_rank = max(1, threads // 2)
    plain = [
        SideSpec(EAGER, "eager", 1, threads),
        SideSpec(COMPILED, "torch-compile", 1, threads, prompts=False),
        SideSpec(HUGGING_FACE_TP, "hugging-face-tp", 2, a_rank, most_sequences=1, prompts=False),
        SideSpec(LLAMA, "llama.cpp", 1, threads, of["llama.cpp"]),
        SideSpec(OPENVINO, "openvino", 1, threads, of["openvino"], of.get("openvino-export", "")),
        SideSpec(ONE, "tpcompile", 1, threads),
        SideSpec(TWO, "tpcompile", 2, threads, prompts=False),
        SideSpec(NATIVE, "tpcompile-native", 1, threads),
        SideSpec(NATIVE_TWO, "tpcompile-native", 2, threads, prompts=False),
    ]
    by_name = {spec.name: spec for spec in plain}
    all_specs = {spec.name: spec for spec in plain}
    for wanted in weights:
        integers = integers_of(wanted)
        for peer, name in (
            (LLAMA, f"{LLAMA} {LLAMA_TYPES[integers]}"),
            (OPENVINO, f"{OPENVINO} {integers}"),
        ):
            all_specs[name] = replace(by_name[peer], name=name, weights=integers)
        for side, values in product((ONE, TWO, NATIVE, NATIVE_TWO), activations):
            name = f"{side} {wanted}{ROUNDED[values]}"
            all_specs[name] = replace(
                by_name[side], name=name, weights=wanted, head=head, activations=values
            )
    return list(all_specs.values())


def engine_specs(
    options: argparse.Namespace, kinds: Mapping[str, str], longest: int
) -> list[SideSpec]:
    """Return the sides of these kinds, by name, that the options choose; all run in turn."""
    pythons = dict(options.peer_python)
    return [
        SideSpec(
            *(name, kind, 1, options.threads, pythons.get(kind, sys.executable)),
            export_python=pythons.get("openvino-export", ""),
            longest=longest,
        )
        for name, kind in kinds.items()
        if not options.sides or any(word in name for word in options.sides)
    ]


def file_specs(
    threads: int,
    pythons: Mapping[str, str] | None = None,
    activations: Sequence[str] = ACTIVATIONS[:1],
) -> list[SideSpec]:
    """Return the sides that read GGUF files. Those of tpcompile also read checkpoints."""
    plain = {spec.name: spec for spec in specs(threads, pythons)}
    native = [
        replace(plain[NATIVE], name=f"{NATIVE}{ROUNDED[values]}", activations=values)
        for values in activations
    ]
    return [plain[LLAMA], plain[OPENVINO], *native]


def parse(arguments: Sequence[str], description: str | None) -> argparse.Namespace:
    """Return the options; `chosen` are the sides, and `reference` is one of all sides."""
    parser = argparse.ArgumentParser("python -m benchmarks decode", description=description)
    _add_cases(parser)
    _add_sides(parser)
    _add_output(parser)
    options = parser.parse_args(arguments)
    words = options.sides
    directories = any(file.is_dir() for file in options.files)
    options.reference = NATIVE if directories else LLAMA if options.files else EAGER
    for name in _OF_CHECKPOINTS if options.files else ():
        if getattr(options, name) != parser.get_default(name):
            parser.error(f"--{name} applies to presets, not to files and directories")
    try:
        for wanted in options.weights or [None]:
            scheme_of(wanted, options.head)
    except UsageError as error:
        parser.error(str(error))
    if "int8" in options.activations and not options.weights and not options.files:
        parser.error("--activations int8 applies to weights of few bits: pass --weights")
    pythons = dict(options.peer_python)
    if options.files:
        every = file_specs(options.threads, pythons, options.activations)
        every = [spec for spec in every if not directories or spec.kind not in PEER_KINDS]
    else:
        every = specs(options.threads, pythons, options.weights, options.head, options.activations)
    options.chosen = [s for s in every if not words or any(word in s.name for word in words)]
    if not options.chosen:
        parser.error(f"--sides matches no side; the sides are {', '.join(s.name for s in every)}")
    if options.at_once == 1 and len(options.chosen) > 1:
        parser.error(f"--at-once must be at least 2: {options.reference} is in every group")
    if options.plot is not None and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    return options


def _add_cases(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    help = "GGUF files or directories of checkpoints to measure, instead of a preset"
    add("files", type=stored_model, nargs="*", metavar="FILE", help=help)
    help = f"model to measure, a preset of Qwen3 or Qwen3.5; targets apply to {MODEL}"
    add("--model", default=MODEL, metavar="PRESET", help=help)
    help = "numbers of tokens before the first step"
    add("--contexts", type=positive, nargs="+", default=[64, 1024, 4096], metavar="N", help=help)
    help = "numbers of sequences, decoded together"
    add("--batches", type=positive, nargs="+", default=[1], metavar="N", help=help)
    add("--dtypes", nargs="+", choices=list(DTYPES), default=["bf16"], help="dtypes of the weights")
    help = "formats of weights to measure too, as of `tpcompile.compile`, such as int8 int4:64"
    add("--weights", nargs="+", default=[], metavar="FORMAT", help=help)
    help = "what the head becomes in these formats; default: int8"
    add("--head", choices=HEADS, help=help)
    help = "how activations enter products of these weights; int8 rounds them; default: 16"
    add("--activations", nargs="+", choices=ACTIVATIONS, default=ACTIVATIONS[:1], help=help)
    help = "decode steps of each side in each case"
    add("--steps", type=positive, default=20, metavar="N", help=help)
    help = "number of prompts of each length; may be 0"
    add("--prefills", type=not_negative, default=10, metavar="N", help=help)
    help = "lengths of prompts in tokens"
    add("--prompts", type=positive, nargs="+", default=[PREFILL], metavar="N", help=help)
    help = "keep the checkpoints and their conversions here; default: a temporary directory"
    add("--directory", type=Path, metavar="DIR", help=help)


def _add_sides(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--sides", nargs="+", metavar="NAME", help="measure only sides whose name contains a NAME")
    help = "run sides in groups of at most N, to save memory; each group contains the reference"
    add("--at-once", type=positive, metavar="N", help=help)
    threads = os.cpu_count() or 1
    add("--threads", type=positive, default=threads, help="threads of each side, in total")
    help = f"run a peer under another interpreter; NAME is one of {', '.join(PEER_KINDS)}"
    add(
        "--peer-python",
        type=peer_python(PEER_KINDS),
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help=help,
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--json", action="store_true", help="print JSON instead of the table")
    add("--plot", type=Path, metavar="FILE", help="draw time per step against context, as PNG")
    help = "show the results of an earlier run with --json, and measure nothing"
    add("--from", dest="earlier", type=_results, metavar="FILE", help=help)


def stored_model(text: str) -> Path:
    """Return the absolute path of a GGUF file or a checkpoint that tpcompile reads."""
    checkpoint = Path(text).is_dir()
    if not checkpoint and not is_gguf(text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a GGUF file nor a directory")
    try:
        config_of(text)
    except CompileError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not checkpoint and len(open_gguf(text).sizes) > 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} must hold the whole model, got one of its parts"
        )
    return Path(text).absolute()


def peer_python(kinds: Sequence[str]) -> Callable[[str], tuple[str, str]]:
    """Return the type of an option `NAME=PYTHON` with one of these names."""

    def parsed(text: str) -> tuple[str, str]:
        name, _, python = text.partition("=")
        if name not in kinds:
            raise argparse.ArgumentTypeError(
                f"must start with one of {', '.join(kinds)}, got {text!r}"
            )
        executable = shutil.which(os.path.expanduser(python))
        if executable is None:
            raise argparse.ArgumentTypeError(f"{python!r} is not an executable file")
        return name, os.path.abspath(executable)

    return parsed


def _results(path: str) -> Measured:
    try:
        return from_json(json.loads(Path(path).read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{path} must hold results of --json: {error!r}") from None
