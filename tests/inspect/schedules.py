"""Abstract programs with the structure of a decode step: instruction kinds, layers and ranks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from tpcompile.inspect.timeline import Timeline
from tpcompile.vm.program import Buffer, Region
from tpcompile.vm.program.instruction import Parts
from tpcompile.vm.schedule.assemble import assemble
from tpcompile.vm.schedule.clock import timing
from tpcompile.vm.targets import Target


@dataclass(frozen=True)
class Step:
    """Instruction with a label, a layer, accesses and a cost."""

    name: ClassVar[str] = "step"

    label: str
    layer: int = -1
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()
    cost: float = 1.0
    rank: int = 0
    joins: tuple[()] = ()
    traffic: int = 0
    values: int = 0

    def parts(self, target: Target) -> Parts:
        """Return the cost as a fixed time, and the traffic."""
        return Parts(self.cost, self.traffic, 0.0)


class Embed(Step):
    """The first instruction of the step."""

    name = "embed"


class NormQkvRows(Step):
    """Instruction with one instance per head."""

    name = "norm_qkv_rows"


class PartialAttention(Step):
    """Instruction with one instance per head."""

    name = "partial_attention"


class LinearResidual(Step):
    """Instruction with one instance per block of rows."""

    name = "linear_residual"


class Argmax(Step):
    """The last instruction of the step."""

    name = "argmax"


HEADS, BLOCKS = 4, 6
_X, _QKV, _ATTENDED = range(3)
BUFFERS = (Buffer("x", (BLOCKS,)), Buffer("q<k>&v", (HEADS,)), Buffer("attended", (HEADS,)))


def _part(buffer: int, place: int) -> tuple[Region, ...]:
    return (Region(buffer, ((place, place + 1),)),)


def _all(buffer: int) -> tuple[Region, ...]:
    return (Region(buffer, BUFFERS[buffer].box),)


def steps(layers: int) -> tuple[Step, ...]:
    """Return the instructions in program order."""
    instructions: list[Step] = [Embed("embed", -1, (), _all(_X), 0.5)]
    for layer in range(layers):
        for h in range(HEADS):
            name = f"layer {layer} qkv <{h}>"
            instructions.append(NormQkvRows(name, layer, _all(_X), _part(_QKV, h), 2.0))
        for h in range(HEADS):
            name = f'layer {layer} attention & "{h}"'
            reads, writes = _part(_QKV, h), _part(_ATTENDED, h)
            instructions.append(PartialAttention(name, layer, reads, writes, 1.25 + h))
        for b in range(BLOCKS):
            name = f"layer {layer} rows {b}"
            reads = (*_all(_ATTENDED), *_part(_X, b))
            instructions.append(LinearResidual(name, layer, reads, _part(_X, b), 1.5))
    return (*instructions, Argmax("argmax", -1, _all(_X), (), 0.75))


def step_timeline(layers: int, workers: int = 3, policy: str = "critical-path") -> Timeline:
    """Return the timeline of such a program on one rank."""
    instructions = steps(layers)
    costs = [step.cost for step in instructions]
    program = assemble("steps", BUFFERS, instructions, costs, policy, workers).program
    return Timeline(program, timing(program, costs))


def ranked(layers: int, workers: int, ranks: int) -> Timeline:
    """Return a timeline whose workers are divided among several ranks."""
    timeline = step_timeline(layers, workers * ranks, "round-robin")
    return Timeline(dataclasses.replace(timeline.program, ranks=ranks), timeline.timing)


def without_layers(timeline: Timeline) -> Timeline:
    plain = tuple(dataclasses.replace(i, layer=-1) for i in timeline.program.instructions)
    return Timeline(dataclasses.replace(timeline.program, instructions=plain), timeline.timing)


def many_kinds() -> Timeline:
    """Return a timeline with more instruction kinds than fit into a line of the legend."""
    timeline = step_timeline(2, 3)
    steps = tuple(
        type("Kind", (Step,), {"name": f"a_kind_of_instruction_{place}"})(instruction.label)
        for place, instruction in enumerate(timeline.program.instructions)
    )
    return Timeline(dataclasses.replace(timeline.program, instructions=steps), timeline.timing)


SHORT = (step_timeline(2, 3), step_timeline(8, 6, "round-robin"), ranked(2, 2, 2))
LONG = (step_timeline(60, 2), step_timeline(60, 20, "round-robin"), ranked(40, 20, 16))
CUT = without_layers(step_timeline(60, 3))
