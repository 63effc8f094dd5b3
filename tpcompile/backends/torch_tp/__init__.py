"""Torch modules as readable Python source, one per rank."""

from tpcompile.backends.torch_tp.emit import emit_sources
from tpcompile.backends.torch_tp.load import load_rank, run_simulated, run_together
from tpcompile.backends.torch_tp.matrix import as_matrix, linear, plain
from tpcompile.backends.torch_tp.router import Router
from tpcompile.backends.torch_tp.storage import Storage, storages_of

__all__ = [
    "Router",
    "Storage",
    "as_matrix",
    "emit_sources",
    "linear",
    "load_rank",
    "plain",
    "run_simulated",
    "run_together",
    "storages_of",
]
