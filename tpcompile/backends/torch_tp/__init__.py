"""One torch module per rank, as readable Python source."""

from tpcompile.backends.torch_tp.emit import emit_source
from tpcompile.backends.torch_tp.expressions import is_matrix
from tpcompile.backends.torch_tp.load import load_rank, run_simulated, run_together
from tpcompile.backends.torch_tp.matrix import as_matrix, plain

__all__ = [
    "as_matrix",
    "emit_source",
    "is_matrix",
    "load_rank",
    "plain",
    "run_simulated",
    "run_together",
]
