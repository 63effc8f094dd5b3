"""Workers detect the end of their parent; interpreters here import no heavy modules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def _start(code: str, *inherited: int) -> subprocess.Popen[str]:
    head = f"import os, sys; sys.path.insert(0, {str(ROOT)!r})\n"
    head += "from tpcompile.runtime.ranks.worker_start import _end_with_parent, die_with\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + code],
        pass_fds=inherited,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_parent_that_has_already_ended() -> None:
    """If the parent ended earlier, no signal comes, so the worker checks its parent's id."""
    with _start(f"die_with({os.getpid()}); print('mine')") as child:
        assert child.communicate(timeout=60) == ("mine\n", None)
        assert child.returncode == 0
    with _start(f"die_with({os.getppid()}); print('mine')") as orphan:
        assert orphan.communicate(timeout=60) == ("", None)
        assert orphan.returncode == 1


def test_the_end_of_the_lifeline() -> None:
    """The end of the lifeline ends a worker; some systems have no parent-death signal."""
    watched, lifeline = os.pipe()
    with _start(f"print('up', flush=True); _end_with_parent({watched}, os.getppid())", watched) as (
        child
    ):
        os.close(watched)
        assert child.stdout is not None and child.stdout.readline() == "up\n"
        assert child.poll() is None
        os.close(lifeline)
        assert child.wait(60) == 1
