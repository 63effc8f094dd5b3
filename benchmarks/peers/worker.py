"""The process of one side: `python -m benchmarks.peers.worker KIND DIRECTORY TP THREADS SOCKET`.

It loads the model and then answers requests. Between requests rank 0 waits on a socket, and the
other ranks of the side wait in a broadcast, so none spins while another side is measured.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.kinds import KINDS, Loaded, best, from_rank_zero, rank


class Runner:
    """A sequence that grows one token at a time, as in `generate`."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._cache: Any = None

    def prefill(self, tokens: Sequence[int]) -> tuple[list[float], Any]:
        """Start a new sequence. Return the seconds up to the next token, and the logits."""
        self._cache = self._loaded.new_cache()
        seconds, logits = self._step(tokens)
        return [seconds], _sendable(logits)

    def decode(self, tokens: Sequence[int]) -> tuple[list[float], Any]:
        """Decode the given tokens. Return the seconds of each, and the logits of the last.

        Each step computes the best token, but the next step takes the given one.
        """
        steps = [self._step([token]) for token in tokens]
        return [seconds for seconds, _ in steps], _sendable(steps[-1][1])

    def _step(self, tokens: Sequence[int]) -> tuple[float, torch.Tensor]:
        ids = torch.tensor([list(tokens)])
        started = time.perf_counter()
        with torch.inference_mode():
            result = self._loaded.model(
                input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1
            )
            best(result.logits)
        seconds = time.perf_counter() - started
        self._cache = result.past_key_values
        return seconds, result.logits


def _sendable(logits: torch.Tensor) -> Any:
    return logits[0, -1].float().numpy()


def serve(loaded: Loaded, parent: Connection | None) -> None:
    """Answer requests until one is None. Only rank 0 has a parent, and only it answers."""
    runner = Runner(loaded)
    while True:
        request = from_rank_zero(parent.recv() if parent is not None else None)
        if request is None:
            return
        name, arguments = request
        result = getattr(runner, name)(arguments)
        if parent is not None:
            parent.send(("done", result))


def main(arguments: Sequence[str]) -> int:
    kind, directory, tp, threads, socket = arguments
    torch.set_num_threads(int(threads))
    parent: Connection | None = None
    if os.environ.get("RANK", "0") == "0":  # the rank, set by torchrun
        parent = Client(socket, family="AF_UNIX")
    try:
        loaded = KINDS[kind](Path(directory), int(tp))
        assert (rank() == 0) == (parent is not None)
        if parent is not None:
            parent.send(("done", loaded.processes))
        serve(loaded, parent)
    except (EOFError, BrokenPipeError):  # the parent is gone
        return 1
    except BaseException:
        if parent is not None:
            parent.send(("failed", traceback.format_exc()))
        raise
    finally:
        if parent is not None:
            parent.close()
    if close := getattr(loaded.model, "close", None):
        close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
