"""A checkpoint that loses the end of a file as soon as it is opened, as if it were written anew."""

from __future__ import annotations

import os
import time

from tpcompile.runtime.checkpoint import Checkpoint, CheckpointFiles
from tpcompile.runtime.checkpoint_files import SINGLE

ALONE = "opened-by-nobody-else"
"""A file of this name stands for the other of two ranks."""


class ShrinkingFiles(CheckpointFiles):
    """The ranks, which are other processes, find this class by its name.

    Each waits until both have the file open: one that came later would find it short already.
    """

    def open(self) -> Checkpoint:
        opened = super().open()
        (self.directory / f"opened-by-{os.getpid()}").touch()
        while len(list(self.directory.glob("opened-by-*"))) < 2:
            time.sleep(0.01)
        os.truncate(self.directory / SINGLE, 4096)
        return opened
