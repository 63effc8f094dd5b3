"""Start, messages and end of all workers of a model."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import select
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import combinations
from typing import TypeVar

from tpcompile.errors import CompileError, RankError
from tpcompile.runtime.ranks.channel import ChannelClosed, Encoded
from tpcompile.runtime.ranks.descriptors import pipe, socket_pair
from tpcompile.runtime.ranks.launcher import Launcher
from tpcompile.runtime.ranks.owner import Owner
from tpcompile.runtime.ranks.worker import Done, Failed, Progress, Ready
from tpcompile.runtime.ranks.worker_process import WorkerProcess

_Answer = TypeVar("_Answer", Ready, Done)
_START_S = 60.0
"""The minimum timeout for the start, which depends on the disk and not on a step's timeout."""
_CAUSE_S = 2.0
"""The time to wait for the original error after a rank reports a lost connection to another."""


class Workers:
    """The worker processes, one per rank; the failure of any worker is raised as an error."""

    def __init__(self, tp: int, threads: int, timeout: float) -> None:
        self._timeout = timeout
        watched, lifeline = pipe()
        starter = _Starter()
        self.end = weakref.finalize(self, _end, Owner(), starter, lifeline)
        """The finaliser that ends all processes; it also runs at deletion and when Python exits."""
        try:
            self._launcher = starter.run(partial(Launcher, tp, watched, threads))
        except BaseException:
            self.end()
            raise
        finally:
            os.close(watched)
        self._workers = self._launcher.workers
        for worker in self._workers:
            worker.channel.set_timeout(timeout)

    @property
    def pids(self) -> list[int]:
        """The process ids, by rank; empty if the workers were ended before they started."""
        pids = self._launcher.pids(_START_S)
        if not pids and self.end.alive:
            self.check_alive()
            raise self._hung(range(len(self._workers)), _START_S)
        return list(pids)

    def check_alive(self) -> None:
        """Raise if a worker has died, for example during long work in this process."""
        for worker in self._workers:
            if not worker.alive():
                raise self._launcher.death(worker.rank)

    def send_file(self, rank: int, file: int) -> None:
        """Send an open file, after the message that announces it."""
        with self._talking(rank):
            self._workers[rank].channel.send_file(file)

    def introduce(self) -> None:
        """Connect every two ranks by a socket pair; a rank receives its ends in peer order."""
        for first, second in combinations(range(len(self._workers)), 2):
            with contextlib.ExitStack() as ends:
                for rank, end in zip((first, second), socket_pair(), strict=True):
                    self.send_file(rank, ends.enter_context(end).fileno())

    def answers(
        self,
        kind: type[_Answer],
        progress: Callable[[Progress], None] = lambda _: None,
        ranks: Sequence[int] | None = None,
        patience: float = 1.0,
    ) -> list[_Answer]:
        """Return the ranks' answers, by rank; raise the original error if a rank fails.

        `patience` multiplies the timeout, for requests that take long by nature.
        """
        waiting = set(range(len(self._workers)) if ranks is None else ranks)
        answers: dict[int, _Answer] = {}
        lost: CompileError | None = None
        limit = max(self._timeout, _START_S) if kind is Ready else self._timeout * patience
        while waiting or lost:
            spoke = self._who_speaks(_CAUSE_S if lost else limit)
            if not spoke:
                raise lost or self._hung(sorted(waiting), limit)
            for worker in spoke:
                message = self._receive(worker)
                if isinstance(message, Progress):
                    progress(message)
                elif isinstance(message, kind):
                    answers[worker.rank] = message
                    waiting.discard(worker.rank)
                elif isinstance(message, Failed) and message.lost_peer:
                    lost = lost or message.error
                elif isinstance(message, Failed):
                    raise message.error
        return [answers[rank] for rank in sorted(answers)]

    def _who_speaks(self, seconds: float) -> list[WorkerProcess]:
        """Wait for messages; return the workers with a message or a closed connection."""
        watched = select.poll()
        by_file = {worker.channel.fileno(): worker for worker in self._workers}
        for file in by_file:
            watched.register(file, select.POLLIN)
        return [by_file[file] for file, _ in watched.poll(math.ceil(seconds * 1000))]

    def send(self, rank: int, message: Encoded) -> None:
        with self._talking(rank):
            self._workers[rank].channel.send_encoded(message)

    def _receive(self, worker: WorkerProcess) -> object:
        with self._talking(worker.rank):
            return worker.channel.receive()

    @contextlib.contextmanager
    def _talking(self, rank: int) -> Iterator[None]:
        """Raise the error of a worker that has ended or does not read or write its channel."""
        try:
            yield
        except ChannelClosed as error:
            raise self._launcher.death(rank) from error
        except TimeoutError as error:
            raise self._hung([rank], self._timeout) from error

    def _hung(self, ranks: Sequence[int], seconds: float) -> RankError:
        stacks = self._launcher.stacks(ranks)
        silent = [rank for rank in ranks if not stacks[rank]]
        named = " and ".join(f"rank {rank}" for rank in silent or ranks)
        return RankError(
            f"{named[:1].upper()}{named[1:]} did not answer for {seconds:g} s",
            got="\n".join(
                f"rank {rank} at:\n{stack}"
                if stack
                else f"no reaction from rank {rank}, as if it were stopped"
                for rank, stack in stacks.items()
            ),
            hint="If the machine is only slow, compile with a larger rank_timeout",
        )


class _Starter:
    """A thread that starts the launcher and then lives as long as the launcher may.

    Linux sends the parent-death signal when the *thread* that started a process ends, and a
    caller's thread may end at any time.
    """

    def __init__(self) -> None:
        self._over: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._started: Future[Launcher] = Future()
        self._thread: threading.Thread | None = None

    def run(self, start: Callable[[], Launcher]) -> Launcher:
        """Call `start` in the thread, which then waits for `end`; return the result."""
        self._thread = threading.Thread(
            target=_start_and_stay, args=(start, self._started, self._over), daemon=True
        )
        self._thread.start()
        return self._started.result()

    def started(self) -> Launcher | None:
        """Wait until the launcher has started and return it, or None if it was never started."""
        if self._thread is None or self._thread.ident is None or self._started.exception():
            return None
        return self._started.result()

    def end(self) -> None:
        """End the thread."""
        self._over.put(None)
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()


def _start_and_stay(
    start: Callable[[], Launcher], started: Future[Launcher], over: queue.SimpleQueue[None]
) -> None:
    try:
        started.set_result(start())
    except BaseException as error:  # the future raises it in the caller
        started.set_exception(error)
    over.get()


def _end(owner: Owner, starter: _Starter, lifeline: int) -> None:
    """End the workers. A fork of their parent only closes its copies of their files."""
    launcher = starter.started()
    if owner.here:
        if launcher is not None:
            launcher.end()
        starter.end()
    elif launcher is not None:
        launcher.disown()
    os.close(lifeline)
