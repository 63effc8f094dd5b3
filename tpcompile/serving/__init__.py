"""Many requests at once: the scheduler, its blocks, sampling and the engine."""

from tpcompile.serving.engine import Engine
from tpcompile.serving.params import SamplingParams
from tpcompile.serving.plan import Limits
from tpcompile.serving.requests import Completion, Event, Handle
from tpcompile.serving.scheduler import Scheduler
from tpcompile.serving.structure import Structure
from tpcompile.serving.thinking import ThinkingRules

__all__ = [
    "Completion",
    "Engine",
    "Event",
    "Handle",
    "Limits",
    "SamplingParams",
    "Scheduler",
    "Structure",
    "ThinkingRules",
]
