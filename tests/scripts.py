"""Run Python command lines in forks of a process that has already imported torch and models.

For tests whose subject is the script, not the start of Python: the imports take seconds per
process. Otherwise a script runs as usual, with its own standard files, session, arguments,
environment and exit functions, and under torchrun its agent.
"""

from __future__ import annotations

import atexit
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from benchmarks.peers.side import start_process
from tests.launches import CONTEXT, File, Forked

ROOT = Path(__file__).parents[1]


def start(arguments: Sequence[str], out: int, err: int, *, ranks: int = 0) -> Forked:
    """Do what `python *arguments` does, writing to `out` and `err`, in a new session.

    With `ranks`, do what `torchrun --nproc-per-node RANKS *arguments` does.
    """
    main_arguments = (list(arguments), [File(out), File(err)], ranks)
    process = CONTEXT.Process(target=_main, args=main_arguments)
    process.start()
    return Forked(process)


def run(
    arguments: Sequence[str], *, ranks: int = 0, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run to completion, or kill it after the timeout; return the status and the output."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = start(arguments, out.fileno(), err.fileno(), ranks=ranks)
        try:
            status = process.wait(timeout)
        finally:
            process.kill()
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(list(arguments), status, out.read(), err.read())


def start_side(
    python: str, arguments: Sequence[str], log: BinaryIO
) -> Forked | subprocess.Popen[bytes]:
    """Do what `benchmarks.peers.side.start_process` does; call it for other interpreters."""
    if python != sys.executable:
        return start_process(python, arguments, log)
    return start(arguments, log.fileno(), log.fileno())


def _main(arguments: list[str], files: list[File], ranks: int) -> None:
    os.setsid()
    os.chdir(ROOT)
    for number, file in enumerate(files, start=1):
        os.dup2(file.number, number)
        os.close(file.number)
    torch.set_num_threads(1)
    if ranks:
        _torchrun(arguments, ranks)
    else:
        _python(arguments)


def _torchrun(arguments: list[str], ranks: int) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        1,
        1,
        ranks,
        run_id="tests",
        max_restarts=0,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        start_method="fork",
    )
    elastic_launch(config, _python)(arguments)


def _python(arguments: list[str]) -> None:
    """Run a script, or a module after `-m`, and exit like the interpreter."""
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    finally:
        _finish()


def _finish() -> None:
    """Call the exit functions, which `multiprocessing` skips."""
    call: Any = vars(atexit)["_run_exitfuncs"]
    call()
