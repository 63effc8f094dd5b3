"""The tile bodies of the Triton kernel: a file for each instruction group.

Each body gets the words of an instruction, the table of buffers, the scratch memory of its worker,
and its `SHAPE`: the constants that all instructions of a branch share. The package is imported once
per mode: compiled for a GPU, or interpreted.
"""

from . import (  # noqa: F401 - all of them are imported in one mode
    attention,
    delta,
    embed,
    experts,
    head,
    mlp,
    project,
    qkv,
    reduce,
    router,
    rows,
    shape,
    sync,
)
