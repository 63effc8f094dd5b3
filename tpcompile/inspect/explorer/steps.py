"""The schedule as data of the page: the program, its simulated clock and measured steps.

Most data are columns with one number per instruction. Sequences of different lengths, such as the
waits of each instruction, are one column of lengths and one of all elements. Times are integers in
ns, so that sums are exact in every order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain, count
from operator import itemgetter
from typing import Any, cast

import numpy as np

from tpcompile.inspect.bandwidth import bandwidth_of
from tpcompile.inspect.colours import colour_of
from tpcompile.inspect.explorer.accesses import access_columns, buffer_data
from tpcompile.inspect.explorer.columns import pack_columns, small
from tpcompile.inspect.explorer.operands import Groups, operand_data
from tpcompile.inspect.schedule import ScheduleReport
from tpcompile.inspect.timeline import Timeline
from tpcompile.pause import paused_collector
from tpcompile.vm.program import Program
from tpcompile.vm.program.instruction import Parts, StepInstruction
from tpcompile.vm.schedule.clock import Timing
from tpcompile.vm.schedule.measured import MeasuredStep, MeasuredSteps
from tpcompile.vm.schedule.scheduled import Scheduled

Columns = dict[str, np.ndarray]
_MOST_FAULTS = 200


@paused_collector()
def step_data(
    report: ScheduleReport | Scheduled, measured: MeasuredSteps | None = None
) -> tuple[dict[str, Any], bytes]:
    """Return the schedule as JSON and as columns, whose index is part of the JSON.

    A program with faults has no clock, because it may never terminate; then the columns are empty.
    """
    options, schedule = (
        ({}, report) if isinstance(report, Scheduled) else (report.choices, report.schedule)
    )
    data = {"asked": options, **_figures(schedule), "measured": []}
    if schedule.timing is None:
        return {**data, "index": {}}, b""
    instructions = cast("tuple[StepInstruction, ...]", schedule.program.instructions)
    groups = Groups.of_all(instructions)
    operands, columns = operand_data(instructions, groups)
    kinds = [{**kind, "colour": colour_of(kind["name"])} for kind in operands]
    parts, columns["parts"] = _parts(schedule.parts)
    buffers, held = buffer_data(schedule.program.buffers)
    columns |= held | access_columns(schedule.program) | _order(schedule.program)
    columns |= _clock(schedule.program, schedule.timing)
    data |= {"kinds": kinds, "words": groups.words, "parts": parts, "buffers": buffers}
    if measured is not None:
        data["measured"] = [{"us": step.step_us} for step in measured.steps]
        for number, step in enumerate(measured.steps):
            columns |= _measured(number, step)
    data["index"], blob = pack_columns(columns)
    return data, blob


def _figures(schedule: Scheduled) -> dict[str, Any]:
    program, clock = schedule.program, schedule.timing
    return {
        "name": program.name,
        "target": asdict(schedule.target),
        "instructions": len(program.instructions),
        "counters": program.counters,
        "ranks": program.ranks,
        "workers": len(program.queues) * program.sharing,
        "sharing": program.sharing,
        "makespan_us": None if clock is None else clock.makespan,
        "critical_us": schedule.critical_us,
        "bandwidth": bandwidth_of(program, schedule.parts, schedule.target).to_json(),
        "verified": not schedule.faults,
        "computes_graph": schedule.computed.summary,
        "fault_count": sum(fault.count for fault in schedule.faults),
        "faults": [
            {"rule": fault.rule, "said": fault.message} for fault in schedule.faults[:_MOST_FAULTS]
        ],
    }


def _parts(parts: Sequence[Parts]) -> tuple[list[list[float]], np.ndarray]:
    """Return the distinct parts of times, in ns and bytes, and those of each instruction."""
    places: defaultdict[Parts, int] = defaultdict(count().__next__)
    column = small(map(places.__getitem__, parts))
    table = [
        [round(part.fixed_us * 1000), part.traffic, round(part.work_us * 1000)] for part in places
    ]
    return table, column


def _order(program: Program) -> Columns:
    """Return the waits of each instruction, and the counters that it signals."""
    waits = list(chain.from_iterable(program.waits))
    return {
        "waits": small(map(len, program.waits)),
        "wait_counter": small(map(itemgetter(0), waits)),
        "wait_until": small(map(itemgetter(1), waits)),
        "signals": small(map(len, program.signals)),
        "signal_counter": small(chain.from_iterable(program.signals)),
    }


def _clock(program: Program, timing: Timing) -> Columns:
    """Return the start, the finish, the worker and the last wait of each instruction."""
    timeline = Timeline(program, timing)
    early = timeline.released_by
    return {
        "start": _ns(timing.starts),
        "finish": _ns(timing.finishes),
        "worker": small(timing.workers),
        "released_by": small(-1 if number is None else number for number in early),
        "chain": small(timeline.chain),
    }


def _measured(number: int, step: MeasuredStep) -> Columns:
    """Return the columns of a measured step: the wait and the execution follow the begin."""
    begins, starts = _ns(step.begins), _ns(step.timing.starts)
    times = {
        "begin": begins,
        "wait": starts - begins,
        "run": _ns(step.timing.finishes) - starts,
        "worker": small(step.timing.workers),
    }
    return {f"measured_{number}_{name}": column for name, column in times.items()}


def _ns(moments: Sequence[float]) -> np.ndarray:
    """Return times in ns: int32, or whole floats if a step takes longer than two seconds."""
    times = np.rint(np.array(moments, np.float64) * 1000)
    fits = not times.size or times.max() <= np.iinfo(np.int32).max
    return times.astype(np.int32) if fits else times
