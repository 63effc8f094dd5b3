"""The process of one side: `python -m benchmarks.peers.worker KIND SOCKET SETTINGS`.

It loads the model and then answers requests. Between requests rank 0 waits on a socket, and the
other ranks of the side wait in a broadcast, so none spins while another side is measured. Arrays
are sent as bytes, because the interpreters may have different versions of numpy.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from benchmarks.peers.kinds import (
    KINDS,
    Continued,
    Decoder,
    Guessed,
    Guesser,
    Loaded,
    Service,
    Settings,
    Writer,
    Written,
)

Rows = Sequence[Sequence[int]]
Result = tuple[list[float], tuple[tuple[int, ...], bytes]]
"""The seconds of each step, and the logits of the last: their shape and fp32 numbers."""


class Stepwise:
    """A writer made of a decoder: each step's best token is the input of the next."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def write(self, prompt: Sequence[int], new: int) -> Written:
        """Continue a prompt greedily by `new` tokens."""
        tokens: list[int] = []
        times: list[float] = []
        self._decoder.begin(1, len(prompt) + new)
        while len(tokens) < new:
            logits = self._decoder.step([tokens[-1:] or prompt])
            tokens.append(int(self._decoder.numbers(logits)[0].argmax()))
            times.append(time.monotonic())
        return tokens, times


class Runner:
    """The requests that a side answers: of decoders, services, guessers, and `write`."""

    def __init__(self, model: Any) -> None:
        self._decoder: Decoder = model
        self._service: Service = model
        self._guesser: Guesser = model
        self._writer: Writer = model if isinstance(model, Writer) else Stepwise(model)

    def serve(self, prompts: Rows, new: int) -> list[Continued]:
        """Continue all prompts at the same time by `new` tokens each."""
        return self._service.serve(prompts, new)

    def write(self, prompt: Sequence[int], new: int) -> Written:
        """Continue a prompt greedily by `new` tokens."""
        return self._writer.write(prompt, new)

    def guess(self, prompt: Sequence[int], new: int, most: int) -> Guessed:
        """Continue a prompt greedily by `new` tokens, with up to `most` guesses per step."""
        return self._guesser.guess(prompt, new, most)

    def prefill(self, rows: Rows, length: int) -> Result:
        """Start new sequences of up to `length` tokens."""
        self._decoder.begin(len(rows), length)
        return self._steps([rows])

    def decode(self, rows: Rows) -> Result:
        """Decode the given tokens of each sequence, one step per token."""
        return self._steps([[[token] for token in column] for column in zip(*rows, strict=True)])

    def _steps(self, steps: Sequence[Rows]) -> Result:
        seconds = []
        for rows in steps:
            started = time.perf_counter()
            logits = self._decoder.step(rows)
            seconds.append(time.perf_counter() - started)
        numbers = self._decoder.numbers(logits)
        return seconds, (tuple(numbers.shape), numbers.tobytes())


def serve(loaded: Loaded, parent: Connection | None) -> None:
    """Answer requests until one is None. Only rank 0 has a parent, and only it answers."""
    runner = Runner(loaded.model)
    while True:
        request = loaded.from_rank_zero(parent.recv() if parent is not None else None)
        if request is None:
            return
        name, *arguments = request
        value = getattr(runner, name)(*arguments)
        if parent is not None:
            parent.send(("done", value))


def main(arguments: Sequence[str]) -> int:
    kind, socket, settings = arguments
    parent: Connection | None = None
    if os.environ.get("RANK", "0") == "0":  # the rank, set by torchrun
        parent = Client(socket, family="AF_UNIX")
    try:
        return _run(kind, Settings(**json.loads(settings)), parent)
    except (EOFError, BrokenPipeError):  # the parent is gone
        return 1
    except BaseException as error:
        if parent is not None:
            parent.send(_failure(kind, error))
        raise
    finally:
        if parent is not None:
            parent.close()


def _restrict(settings: Settings) -> None:
    """Restrict this process, before it imports anything that counts cores."""
    if settings.group:
        (Path(settings.group) / "cgroup.procs").write_text(str(os.getpid()))
    if settings.cores:
        os.sched_setaffinity(0, settings.cores)


def _run(kind: str, settings: Settings, parent: Connection | None) -> int:
    _restrict(settings)
    loaded = KINDS[kind].load(settings)
    if parent is not None:
        sizes = asdict(loaded.sizes) if loaded.sizes is not None else None
        parent.send(("done", (loaded.processes, sizes, loaded.seconds)))
    serve(loaded, parent)
    loaded.close()
    return 0


def _failure(kind: str, error: BaseException) -> tuple[str, Any]:
    if not isinstance(error, ModuleNotFoundError):
        return "failed", "".join(traceback.format_exception(error))
    return "not installed", (
        f"{error}. Run `pip install {KINDS[kind].packages}`, or select another interpreter that "
        f"has these packages: --peer-python {kind}=PYTHON"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
