"""One torch module a rank, as Python source that people can read."""

from tpcompile.backends.torch_tp.emit import emit_source
from tpcompile.backends.torch_tp.group import Group, SimulatedGroup
from tpcompile.backends.torch_tp.load import load_rank, run_simulated

__all__ = ["Group", "SimulatedGroup", "emit_source", "load_rank", "run_simulated"]
