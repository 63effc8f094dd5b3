"""The tile bodies of the Triton kernel: a file for each instruction group.

Each body gets the words of an instruction, the table of buffers and the scratch memory of its
worker. Extents that all instructions of a shape share are constants. The package is imported once
per mode: compiled for a GPU, or interpreted.
"""

from . import attention, delta, embed, experts, head, mlp, project, qkv, reduce, router, rows, sync

__all__ = [
    "attention",
    "delta",
    "embed",
    "experts",
    "head",
    "mlp",
    "project",
    "qkv",
    "reduce",
    "router",
    "rows",
    "sync",
]
