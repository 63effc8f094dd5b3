"""A checkpoint file that is truncated right after it is opened, as if it were being rewritten."""

from __future__ import annotations

import os
import time

from tpcompile.checkpoint_files import SINGLE
from tpcompile.runtime.checkpoint import Checkpoint, CheckpointFiles

ALONE = "opened-by-nobody-else"
"""The name of a file that replaces the second rank."""


class ShrinkingFiles(CheckpointFiles):
    """Checkpoint files truncated after opening; ranks in other processes import it by name.

    Each rank waits until both have opened the file, since a later one would find it truncated.
    """

    def open(self) -> Checkpoint:
        opened = super().open()
        (self.directory / f"opened-by-{os.getpid()}").touch()
        while len(list(self.directory.glob("opened-by-*"))) < 2:
            time.sleep(0.01)
        os.truncate(self.directory / SINGLE, 4096)
        return opened
