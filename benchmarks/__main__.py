"""`python -m benchmarks NAME [options]`."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

BENCHMARKS = {
    "mutants": ("benchmarks.mutants", "detection of mistakes in sharded graphs"),
    "proofs": ("benchmarks.proofs", "the proofs of all pipelines, and of random ones"),
    "compile-time": (
        "benchmarks.compile_time",
        "time of a cold capture, passes, check and emission",
    ),
    "cold": ("benchmarks.cold", "time of plan and schedule as commands, beside their imports"),
    "schedule": ("benchmarks.schedule", "time to lower, schedule and verify a decode step"),
    "explorer": ("benchmarks.explorer", "size of the explorer page, time to make and use it"),
    "sum": ("benchmarks.sum", "time of a sum over ranks: gloo, sockets and shared memory"),
    "decode": ("benchmarks.decode", "tokens per second compared with Hugging Face"),
    "contention": ("benchmarks.contention", "decoding beside other programs and on fewer cores"),
    "experts": ("benchmarks.experts", "decode steps and prompts of a mixture of experts"),
    "speculation": ("benchmarks.speculation", "guessed tokens: the cost of rows, and the speed"),
    "speculation-peers": (
        "benchmarks.speculation_peers",
        "guesses from the text: tpcompile and its peers",
    ),
    "speculation-bits": (
        "benchmarks.speculation_bits",
        "guessed tokens: every bit beside plain decoding",
    ),
    "speculation-demo": (
        "benchmarks.speculation_demo",
        "guessed tokens: the demo model, alone and with its draft",
    ),
    "gpu-decode": ("benchmarks.gpu_decode", "decode steps on a GPU: numbers, bandwidth, peers"),
    "choose": ("benchmarks.choose", "time to choose a token from logits, by setting and batch"),
    "grammar": ("benchmarks.grammar", "structured output: compiling schemas, and masks in steps"),
    "serving": ("benchmarks.serving", "many requests at once: simulated, and measured"),
    "servers": ("benchmarks.servers", "many requests at once: tpcompile and its peers"),
    "load": ("benchmarks.load", "memory and time of loading compared with Hugging Face TP"),
}
"""The module of each benchmark, whose `main` takes the options, and a description."""


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(_usage())
        return 0
    name, *options = arguments
    if name not in BENCHMARKS:
        near = difflib.get_close_matches(name, BENCHMARKS, n=1, cutoff=0.4)
        known = f"Did you mean {near[0]}?" if near else "Known: " + ", ".join(BENCHMARKS) + "."
        sys.stderr.write(f"There is no benchmark {name!r}. {known}\n")
        return 2
    code: int = importlib.import_module(BENCHMARKS[name][0]).main(options)
    return code


def _usage() -> str:
    names = "".join(f"  {name:19}{says}\n" for name, (_, says) in BENCHMARKS.items())
    return (
        f"usage: python -m benchmarks NAME [--json] [options]\n\n{names}\n"
        "NAME --help lists the options of a benchmark.\n"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
