"""A side of a comparison, as seen by the benchmark that measures it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from benchmarks.peers.kinds import Continued, Guessed, Settings, Sizes, Written
from tpcompile.closing import Closing

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 900.0
LOG_LINES = 15


class SideError(Exception):
    """A side that could not start, failed, or did not answer."""


class NotInstalledError(SideError):
    """A side whose interpreter does not have the packages that it needs."""


@dataclass(frozen=True)
class SideSpec:
    """A side: its kind in benchmarks.peers.kinds, its ranks, and the threads per process."""

    name: str
    kind: str
    tp: int
    threads: int
    python: str = sys.executable
    export_python: str = ""
    most_sequences: int | None = None
    """The largest batch that the side supports; None for any."""
    prompts: bool = True
    """False if the side runs prompts exactly as another side does."""

    longest: int = 0
    """The tokens of the longest sequence, if the side must know it."""
    cores: tuple[int, ...] = ()
    """The cores to which the side is restricted before it loads; empty for no restriction."""
    group: str = ""
    """The directory of the cgroup in which the side loads; empty for that of its parent."""
    weights: str = ""
    """The format to which the weights are quantized, as of `tpcompile.compile`; empty for none."""
    head: str | None = None
    """What the head becomes, as of `tpcompile.compile`."""
    activations: str = "16"
    """How activations enter products of quantized weights, as of `tpcompile.compile`."""

    def command(self, directory: Path, address: Path, largest_batch: int = 1) -> list[str]:
        """Return the arguments of Python that start the side."""
        settings = Settings(
            str(directory),
            self.tp,
            self.threads,
            largest_batch,
            self.export_python,
            self.longest,
            self.cores,
            self.group,
            self.weights,
            self.head,
            self.activations,
        )
        arguments = ["-m", "benchmarks.peers.worker", self.kind, str(address), settings.to_json()]
        if self.kind != "hugging-face-tp":
            return arguments
        torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={self.tp}"]
        torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
        return [*torchrun, "--local-addr=127.0.0.1", *arguments]


def start_process(python: str, arguments: Sequence[str], log: BinaryIO) -> subprocess.Popen[bytes]:
    """Start Python with `arguments` in a new process group, so that all its processes end together.

    Not in a new session: Linux may schedule each session as one group, whose processes then get
    another share beside those of other sessions, whatever their nice values.
    """
    return subprocess.Popen(
        [python, *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        process_group=0,
    )


class Side(Closing):
    """The processes of one side. Between requests they wait without using the CPU."""

    def __init__(self, spec: SideSpec, directory: Path, largest_batch: int = 1) -> None:
        self.spec = spec
        self._own = tempfile.TemporaryDirectory(prefix="tpcompile-side-")
        self._log = Path(self._own.name) / "log"
        self._connection: Connection | None = None
        self.sizes: Sizes | None = None
        """The bytes of the loaded model, if the side knows them."""
        self.seconds: float | None = None
        """The time to load the weights, if the side has measured it."""
        address = Path(self._own.name) / "socket"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(address))
        self._listener.listen(1)
        self.started = time.perf_counter()
        with self._log.open("wb") as log:
            command = spec.command(directory, address, largest_batch)
            self._process = start_process(spec.python, command, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self) -> list[int]:
        """Wait until the model is loaded, and return the processes of its ranks."""
        self._listener.settimeout(0.5)
        deadline = time.monotonic() + LIMIT_SECONDS
        while self._connection is None:
            try:
                self._connection = Connection(self._listener.accept()[0].detach())
            except TimeoutError:
                self._check_alive()
                self._check_time("start", deadline)
        processes: list[int]
        processes, sizes, self.seconds = self._answer()
        self.sizes = Sizes(**sizes) if sizes is not None else None
        return processes

    def ask(self, request: str, *arguments: Any) -> tuple[list[float], Any]:
        """Call a method of the side's `Runner`.

        Return the seconds of each step, and the logits of the last as `[batch, vocabulary]`.
        """
        seconds, (shape, numbers) = self._call(request, *arguments)
        return seconds, np.frombuffer(numbers, np.float32).reshape(shape)

    def serve(self, prompts: Sequence[Sequence[int]], new: int) -> list[Continued]:
        """Continue all prompts at the same time by `new` tokens each."""
        continued: list[Continued] = self._call("serve", prompts, new)
        return continued

    def write(self, prompt: Sequence[int], new: int) -> Written:
        """Continue a prompt greedily by `new` tokens."""
        written: Written = self._call("write", prompt, new)
        return written

    def guess(self, prompt: Sequence[int], new: int, most: int) -> Guessed:
        """Continue a prompt greedily by `new` tokens, with up to `most` guesses per step."""
        guessed: Guessed = self._call("guess", prompt, new, most)
        return guessed

    def pause(self) -> None:
        """Stop all processes of the side: some servers poll while they wait."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let the processes of the side go on."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def _call(self, request: str, *arguments: Any) -> Any:
        assert self._connection is not None, "call ready() first"
        try:
            self._connection.send((request, *arguments))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._ended() from error
        return self._answer()

    def _answer(self) -> Any:
        assert self._connection is not None
        deadline = time.monotonic() + LIMIT_SECONDS
        while not self._connection.poll(0.5):
            self._check_alive()
            self._check_time("answer", deadline)
        try:
            state, value = self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._ended() from error
        if state == "not installed":
            raise NotInstalledError(value)
        if state == "failed":
            raise SideError(f"{self.spec.name} failed:\n{value}")
        return value

    def _check_alive(self) -> None:
        if self._process.poll() is not None:
            raise self._ended()

    def _ended(self) -> SideError:
        """Return why the side does not answer any more."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # then it only closed the connection
            self._process.wait(10)
        status = self._process.poll()
        reason = "ended" if status is None else f"ended with status {status}"
        if status == -signal.SIGKILL:
            reason = "was killed, probably because memory ran out: measure fewer sides at a time"
        return SideError(f"{self.spec.name} {reason}\n{self._last_lines()}".rstrip())

    def _check_time(self, action: str, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise SideError(f"{self.spec.name} did not {action} within {LIMIT_SECONDS:.0f} s")

    def _last_lines(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_LINES:])

    def close(self) -> None:
        """Ask the side to stop, and kill it if it does not."""
        with contextlib.suppress(ProcessLookupError):
            self.resume()
        if self._connection is not None:
            with contextlib.suppress(OSError):  # it has ended already
                self._connection.send(None)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it is killed below
            self._process.wait(10 if self._connection is not None else 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._connection is not None:
            self._connection.close()
        self._listener.close()
        self._own.cleanup()
