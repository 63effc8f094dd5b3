"""The Schedule view: what the program of the decode step is, and where its time goes."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable

from tests.browser.checks.texts import number
from tests.browser.reader import Reader
from tests.browser.subject import TP
from tpcompile.inspect.timeline import Timeline
from tpcompile.vm.program import Region
from tpcompile.vm.program.instruction import StepInstruction, own_fields
from tpcompile.vm.program.region import box_text
from tpcompile.vm.schedule.clock import Timing
from tpcompile.vm.schedule.scheduled import Scheduled

LAYER = 1


def shown(reader: Reader, **place: object) -> Reader:
    """Show the view, and wait until it has read the schedule."""
    reader.go(view="schedule", **place)
    reader.page.wait_for_selector("body[data-schedule]")
    return reader


def timing_of(step: Scheduled) -> Timing:
    assert step.timing is not None
    return step.timing


def timeline_of(step: Scheduled) -> Timeline:
    return Timeline(step.program, timing_of(step))


def a_waiting_instruction(step: Scheduled) -> int:
    """Return an instruction of a layer that waits and signals, not on the first worker or rank."""
    program, workers = step.program, timing_of(step).workers
    return next(
        n
        for n, instruction in enumerate(program.instructions)
        if instruction.name == "linear_terms"
        and isinstance(instruction, StepInstruction)
        and (instruction.layer, instruction.rank) == (LAYER, TP - 1)
        and workers[n] % 3
        and program.waits[n]
        and program.signals[n]
    )


def kinds_of(step: Scheduled, numbers: Iterable[int]) -> Counter[str]:
    return Counter(step.program.instructions[n].name for n in numbers)


def table_under(reader: Reader, heading: str) -> list[list[str]]:
    """Return the rows of the first table after a heading in the tables or the details."""
    rows: list[list[str]] = reader.page.evaluate(
        """heading => {
          const start = [...document.querySelectorAll(".tables h2, #details h2, #details h3")]
            .find(one => one.textContent.trim().startsWith(heading));
          let one = start.nextElementSibling;
          while (!one.querySelector("tr")) one = one.nextElementSibling;
          return [...one.querySelectorAll("tr")]
            .map(row => [...row.cells].map(cell => cell.innerText.trim()));
        }""",
        heading,
    )
    return rows


def figures(reader: Reader, step: Scheduled) -> None:
    """Read the size of the program, and the time of a step."""
    shown(reader)
    count, queues = len(step.program.instructions), len(step.program.queues)
    words = reader.text("p.figures")
    workers = queues * step.program.sharing
    assert f"{count:,} instructions on {workers} workers of {TP} ranks" in words
    assert f"{timing_of(step).makespan:,.1f} µs predicted" in words
    assert "proved free of races and deadlocks" in words


def kinds(reader: Reader, step: Scheduled) -> None:
    """Read how many instructions of each kind there are."""
    shown(reader)
    counts = {row[0]: number(row[1]) for row in table_under(reader, "Where the time") if row[1:2]
             and row[1].replace(",", "").isdigit()}  # fmt: skip
    wanted = kinds_of(step, range(len(step.program.instructions)))
    assert counts.pop("the step") == wanted.total()
    assert counts == wanted


def totals(reader: Reader, step: Scheduled) -> None:
    """Compare the times of each kind at every level of detail with the instructions' own."""
    shown(reader)
    sums = reader.page.evaluate(
        """() => {
          const { levels, totals, rawTotals } = Explorer.timeline;
          return { raw: rawTotals(), levels: levels().map((_, number) => totals(number)) };
        }"""
    )
    wanted: Counter[str] = Counter()
    timing = timing_of(step)
    for instruction, start, finish in zip(
        step.program.instructions, timing.starts, timing.finishes, strict=True
    ):
        wanted[instruction.name] += round(finish * 1000) - round(start * 1000)
    assert sums["raw"] == wanted
    assert len(sums["levels"]) > 1
    assert all(level == sums["raw"] for level in sums["levels"])


def loads(reader: Reader, step: Scheduled) -> None:
    """Read the time that the bytes of each kind take at full bandwidth."""
    shown(reader)
    rate = step.target.bytes_per_us * step.program.ranks
    wanted: defaultdict[str, float] = defaultdict(float)
    for instruction, parts in zip(step.program.instructions, step.parts, strict=True):
        wanted[instruction.name] += parts.traffic / rate
    rows = table_under(reader, "Where the time")
    column = rows[0].index("at full bandwidth")
    for row in rows[1:]:
        if row[0] in wanted:
            assert abs(float(row[column].replace(",", "")) - wanted[row[0]]) <= 0.0051


def operands(reader: Reader, step: Scheduled) -> None:
    """Choose an instruction, and read its kind, layer, worker and operands."""
    chosen = a_waiting_instruction(step)
    shown(reader, instruction=chosen)
    instruction = step.program.instructions[chosen]
    assert isinstance(instruction, StepInstruction)
    facts = dict(reader.rows("#details table.facts")[: 4 + len([*own_fields(instruction)])])
    assert (facts["Kind"], facts["Layer"]) == (instruction.name, f"layer {LAYER}")
    rank, worker = timeline_of(step).tracks[timing_of(step).workers[chosen]]
    assert facts["Worker"] == f"rank {rank}, worker {worker}"
    assert instruction.label in reader.text("#details p.mono")
    for name, value in own_fields(instruction):
        text = f"{value[0]}:{value[1]}" if isinstance(value, tuple) else str(value)
        assert facts[name] == text


def accesses(reader: Reader, step: Scheduled) -> None:
    """Read which parts of which buffers an instruction reads and writes."""
    chosen = a_waiting_instruction(step)
    shown(reader, instruction=chosen)
    instruction = step.program.instructions[chosen]

    def told(region: Region) -> list[str]:
        buffer = step.program.buffers[region.buffer]
        return [f"{buffer.name} of rank {buffer.rank}", box_text(region.box)]

    for title, regions in (("Reads", instruction.reads), ("Writes", instruction.writes)):
        assert [row[:2] for row in table_under(reader, title)[1:]] == [told(r) for r in regions]


def waits(reader: Reader, step: Scheduled) -> None:
    """Read which counters an instruction waits for, who signals them, and through which region."""
    chosen = a_waiting_instruction(step)
    shown(reader, instruction=chosen)
    summaries = reader.texts("#details details.wait > summary")
    assert len(summaries) == len(step.program.waits[chosen])
    for text, wait in zip(summaries, step.program.waits[chosen], strict=True):
        assert text.startswith(f"Counter {wait.counter} reaches {wait.until}: ")
    signallers = step.program.signallers[step.program.waits[chosen][0].counter]
    rows = reader.rows("#details details.wait:first-of-type table")[1:]
    assert {int(row[0].split(":")[0]) for row in rows} <= set(signallers)
    assert rows
    buffers = [step.program.buffers[r.buffer].name for r in step.program.instructions[chosen].reads]
    for _, through in rows:
        hazard, _, part = through.partition(": ")
        assert hazard == "write → read"
        assert part.partition(" [")[0] in [f"{name} of rank {TP - 1}" for name in buffers]


def signals(reader: Reader, step: Scheduled) -> None:
    """Read which counters an instruction signals, and how many instructions wait for each."""
    chosen = a_waiting_instruction(step)
    shown(reader, instruction=chosen)
    waiting = Counter(
        wait.counter for instruction_waits in step.program.waits for wait in instruction_waits
    )
    told = [text for text in reader.texts("#details details > summary") if "wait for it" in text]
    wanted = step.program.signals[chosen]
    assert len(told) == len(wanted) > 0
    for text, counter in zip(told, wanted, strict=True):
        assert re.match(rf"Counter {counter}: {waiting[counter]:,} instructions? ", text)


def critical_path(reader: Reader, step: Scheduled) -> None:
    """Read how many instructions of each kind are on the critical path."""
    shown(reader)
    counts = {row[0]: number(row[1]) for row in table_under(reader, "The critical path")[1:]}
    assert counts == kinds_of(step, timeline_of(step).chain)


def idle(reader: Reader, step: Scheduled) -> None:
    """Read what workers wait for: the pairs of kinds, with the number of gaps of each."""
    shown(reader)
    rows = table_under(reader, "Why workers are idle")
    pairs = {(row[0], row[1]): number(row[2]) for row in rows[1:] if row[1]}
    wanted: Counter[tuple[str, str]] = Counter()
    released, names = timeline_of(step).released_by, step.program.instructions
    for late, gap in enumerate(gaps(step)):
        early = released[late]
        if gap > 0:
            cause = names[early].name if early is not None else "nothing: its counters were reached"
            wanted[cause, names[late].name] += 1
    assert pairs == wanted


def longest_waits(reader: Reader, step: Scheduled) -> None:
    """Read what waits longest in a layer, and for which instruction."""
    shown(reader, layer=LAYER)
    layers = [instruction.layer if isinstance(instruction, StepInstruction) else -1
              for instruction in step.program.instructions]  # fmt: skip
    layer_gaps = [gap for gap, layer in zip(gaps(step), layers, strict=True) if layer == LAYER]
    assert reader.page.eval_on_selector('[aria-label="Layer of the waits"]', "one => one.value")
    rows = reader.rows(".tables h3 + div table")[1:]
    late, early = (int(rows[0][place].split(":")[0]) for place in (0, 2))
    assert layers[late] == LAYER and gaps(step)[late] == max(layer_gaps)
    assert timeline_of(step).released_by[late] == early


def gaps(step: Scheduled) -> list[int]:
    """Return the time in ns that the worker of each instruction was idle before it."""
    timing = timing_of(step)
    times = [0] * len(timing.starts)
    for row in timeline_of(step).rows:
        free = 0
        for index in row:
            times[index] = max(0, round(timing.starts[index] * 1000) - free)
            free = max(free, round(timing.finishes[index] * 1000))
    return times


CHECKS = {
    check.__name__: check
    for check in (
        figures,
        kinds,
        totals,
        loads,
        operands,
        accesses,
        waits,
        signals,
        critical_path,
        idle,
        longest_waits,
    )
}
