"""The lowering of the graph of a decode step to instructions over buffers."""

from tpcompile.vm.lowering.lower import lower
from tpcompile.vm.lowering.plan import LOWERINGS, Lowered, StepPlan

__all__ = ["LOWERINGS", "Lowered", "StepPlan", "lower"]
