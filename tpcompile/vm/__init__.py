"""The program of a decode step: instructions over buffers, in queues, ordered by counters."""

from tpcompile.vm import groups
from tpcompile.vm.lowering import LOWERINGS, Lowered, StepPlan, lower
from tpcompile.vm.program import Buffer, Instruction, Join, Program, Region, Wait
from tpcompile.vm.program.text import format_layer, format_program, parse_program
from tpcompile.vm.proof.fault import Fault
from tpcompile.vm.proof.verify import check_program, verify_program
from tpcompile.vm.schedule.clock import Timing, timing
from tpcompile.vm.schedule.policies import POLICIES
from tpcompile.vm.schedule.scheduled import Scheduled, scheduled
from tpcompile.vm.targets import TARGETS, Target, target_of

__all__ = [
    "LOWERINGS",
    "POLICIES",
    "TARGETS",
    "Buffer",
    "Fault",
    "Instruction",
    "Join",
    "Lowered",
    "Program",
    "Region",
    "Scheduled",
    "StepPlan",
    "Target",
    "Timing",
    "Wait",
    "check_program",
    "format_layer",
    "format_program",
    "groups",
    "lower",
    "parse_program",
    "scheduled",
    "target_of",
    "timing",
    "verify_program",
]
