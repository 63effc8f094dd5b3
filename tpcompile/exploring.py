"""`explore`: everything about a compilation as one page that opens in a browser."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from tpcompile.backends.devices import machine_of, this_device
from tpcompile.backends.rotation import CPU
from tpcompile.compare.comparison import Comparison
from tpcompile.compare.model import compare_with_eager
from tpcompile.errors import UnsupportedError
from tpcompile.frontend import capture
from tpcompile.inspect.explorer.page import page_html
from tpcompile.inspect.explorer.ranks import axes_json, distinct
from tpcompile.inspect.explorer.stages import StageRecorder
from tpcompile.inspect.explorer.steps import step_data
from tpcompile.inspect.files import write_file
from tpcompile.inspect.plan import plan_report
from tpcompile.inspect.schedule import ScheduleReport
from tpcompile.ir.info import info_of
from tpcompile.options import check_shards, dtype_of, passes_for, rounds_inputs, scheme_of
from tpcompile.passes import Instrument, Pass, parse_pipeline, pipeline_text, run_passes
from tpcompile.passes.pipeline import DecodeFork
from tpcompile.pause import paused_collector
from tpcompile.phases import timed
from tpcompile.plugins import load_plugins
from tpcompile.rewriting.manager import Stats
from tpcompile.rewriting.proving import Prover
from tpcompile.rewriting.reproducer import versions, write_reproducer
from tpcompile.runtime.model import CompiledModel
from tpcompile.runtime.ranks.rank import rank_modules
from tpcompile.runtime.weights import adapter_for
from tpcompile.scheduling import Choices, ScheduledStep, choose
from tpcompile.vm.schedule.measured import MeasuredSteps
from tpcompile.vm.schedule.scheduled import scheduled
from tpcompile.vm.targets import Target

Say = Callable[[str], None]
COMPARED = (torch.float32, torch.bfloat16)
"""The dtypes of comparisons with eager."""


@dataclass
class Exploration:
    """The data of a page, collected step by step."""

    title: str
    about: dict[str, str] = field(default_factory=dict)
    recordings: list[StageRecorder] = field(default_factory=list)
    compilations: list[dict[str, Any]] = field(default_factory=list)
    comparisons: list[dict[str, Any]] = field(default_factory=list)
    schedule: tuple[dict[str, Any], bytes] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """The CPU time of this thread for each part of the page, without the compilation."""

    def timed(self, part: str) -> AbstractContextManager[None]:
        """Add the time of the block to that of a part of the page."""
        return timed(self.seconds, part, time.thread_time)

    def html(self) -> str:
        """Return the page."""
        files: dict[str, str] = {}
        for recording in self.recordings:
            files |= recording.lines.files
        data = {
            "title": self.title,
            "about": self.about,
            "recordings": [
                {"lines": record.lines.rows, "bodies": record.bodies, "stages": record.stages}
                for record in self.recordings
            ],
            "compilations": self.compilations,
            "comparisons": self.comparisons,
            "sources": {name: _text_of(path) for name, path in files.items()},
        }
        blobs = {}
        if self.schedule is not None:
            data["schedule"], blobs["schedule"] = self.schedule
        return page_html(self.title, data, blobs)

    def write(self, path: str | Path) -> None:
        """Write the page to a file."""
        with self.timed("writing"):
            text = self.html()
            write_file(Path(path), lambda file: file.write(text))


def explore(
    model: Any,
    tp: int = 1,
    *,
    dtype: torch.dtype | str | None = None,
    pipeline: str | Sequence[Pass] | None = None,
    beside: Iterable[tuple[int, str | Sequence[Pass] | None]] = (),
    target: str | Target | None = None,
    policy: str | None = None,
    workers: int | None = None,
    batch: int = 1,
    context: int | None = None,
    lowering: str | None = None,
    measured: bool = False,
    compare: bool = False,
    random_weights: int | None = None,
    threads: int | None = None,
    weights: str | None = None,
    head: str | None = None,
    activations: str = "16",
    kv: str | None = None,
    experts: str = "auto",
    adapter: str | Path | None = None,
    say: Say = lambda text: None,
) -> Exploration:
    """Collect everything about a compilation of MODEL for `tp` ranks, as the data of a page.

    `beside` are further compilations to look at side by side: pairs of a tp and a pipeline. The
    decode step is scheduled on `target`, by default this machine, with a `policy`, as by
    `schedule`; with `measured`, steps also run on this machine. With `compare`, every value is
    compared with Hugging Face eager in fp32 and in bf16, which needs weights; torch then has
    `threads` threads on each rank. `weights`, `head`, `activations`, `kv`, `experts`
    and `adapter` are those of `compile`.
    """
    load_plugins()
    scheme, rounds = scheme_of(weights, head), rounds_inputs(activations)
    passes = passes_for(pipeline, tp, kv, experts)
    check_shards(passes, tp)
    compilations = [(ranks, passes_for(text, ranks, kv, experts)) for ranks, text in beside]
    choices = choose(
        tp=tp,
        target=machine_of(CPU if measured else this_device(), tp) if target is None else target,
        policy=policy,
        workers=workers,
        batch=batch,
        context=context,
        lowering=lowering,
        measured=CPU if measured else None,
        kv=kv,
        experts=experts,
    )
    say(f"capturing {model}")
    with_weights = capture(model, dtype=dtype_of(dtype), scheme=scheme, rounds=rounds)
    if adapter is not None:
        adapter_for(with_weights, adapter)  # raises unless it fits
    captured = with_weights.graph
    name = model if isinstance(model, str) else info_of(captured).name
    page = _explored(captured, name, passes, choices, measured, say)
    for other_tp, other_passes in compilations:
        say(f"running passes for tp={other_tp}")
        _compiled(page, captured, other_passes, other_tp)
    for kind in COMPARED if compare else ():
        say(f"comparing with eager in {_named(kind)}")
        comparison = compare_with_eager(
            model,
            passes,
            dtype=kind,
            scheme=scheme,
            rounds=rounds,
            random_weights=random_weights,
            adapter=adapter,
            simulate=True,
            threads=threads,
        )
        page.comparisons.append(_comparison(comparison, kind))
    return page


def explore_compiled(
    model: CompiledModel, path: str | Path, *, target: str | Target | None = None, **options: Any
) -> None:
    """Write the page of a compiled model. The options are those of the schedule in `explore`."""
    captured, *stages = model.stages
    graph = captured.graph
    passes = parse_pipeline(",".join(stage.text_form for stage in stages)) if stages else []
    machine = machine_of(model.device, model.tp) if target is None else target
    choices = choose(tp=model.tp, target=machine, **options)
    name = info_of(graph).name
    _explored(graph, name, passes, choices, False, lambda text: None).write(path)


@paused_collector()
def _explored(
    captured: fx.GraphModule,
    name: str,
    passes: Sequence[Pass],
    choices: Choices,
    measured: bool,
    say: Say,
) -> Exploration:
    """Run passes, and those of a decode step, and schedule it."""
    say("running passes")
    tp = choices.tp
    page = Exploration(f"{info_of(captured).name}, tp={tp}", _about(captured, name))
    fork = _compiled(page, captured, passes, tp)
    try:
        _stepped(page, fork, choices, name, measured, say)
    except UnsupportedError as error:  # the modules run it, but there is no program
        page.about["decode step"] = str(error)
    return page


def _about(graph: fx.GraphModule, model: str) -> dict[str, str]:
    info = info_of(graph)
    return {
        "model": model,
        "class": info.model,
        "dtype": _named(info.outputs[0].dtype),
        **versions(),
    }


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _compiled(
    page: Exploration, captured: fx.GraphModule, passes: Sequence[Pass], tp: int
) -> _Fork:
    """Run passes, and add the compilation to the page."""
    fork = DecodeFork(passes)
    prover, recorder = fork.prover, StageRecorder(fork.prover)
    instruments: list[Instrument] = [_timed(recorder, page), fork]
    graph, _ = run_passes(captured, passes, instruments, on_failure=write_reproducer, prover=prover)
    page.recordings.append(recorder)
    number = len(page.recordings) - 1
    name, stages = f"prompts, tp={info_of(graph).tp}", range(len(recorder.stages))
    with page.timed("plan"):
        compilation = _compilation(name, graph, number, stages, passes)
    with page.timed("modules"):
        compilation["modules"] = _modules(graph)
    page.compilations.append(compilation)
    return _Fork(fork, recorder, number, Prover(prover.expressions))


def _timed(record: Instrument, page: Exploration) -> Instrument:
    """Add the time of a recorder's calls to that of the page's stages."""

    def recorded(name: str, gm: fx.GraphModule, stats: Stats) -> None:
        with page.timed("stages"):
            record(name, gm, stats)

    return recorded


@dataclass(frozen=True)
class _Fork:
    """The place in a recording where the passes of a decode step begin to differ."""

    decode: DecodeFork
    recorder: StageRecorder
    recording: int
    prover: Prover


def _compilation(
    name: str,
    graph: fx.GraphModule,
    recording: int,
    stages: Iterable[int],
    passes: Sequence[Pass],
) -> dict[str, Any]:
    info = info_of(graph)
    return {
        "name": name,
        "tp": info.tp,
        "pipeline": pipeline_text(passes),
        "recording": recording,
        "stages": list(stages),
        "plan": plan_report(graph).to_json() if info.plan is not None else None,
        "axes": axes_json(info.plan) if info.plan is not None else [],
    }


def _modules(graph: fx.GraphModule) -> list[str | int]:
    try:
        return distinct([module.source for module in rank_modules(graph)])
    except UnsupportedError:  # a pipeline that ends early has no module
        return []


def _stepped(
    page: Exploration, fork: _Fork, choices: Choices, model: str, measured: bool, say: Say
) -> None:
    """Run the passes of a decode step, schedule it, and add both to the page."""
    recorder, shared = fork.recorder, fork.decode.shared
    first = len(recorder.stages)
    record = _timed(recorder.resumed(shared, fork.prover), page)
    graph = fork.decode.run(choices.spans, [record], fork.prover)
    stages = [*range(shared + 1), *range(first, len(recorder.stages))]
    name = f"decode step, tp={choices.tp}"
    with page.timed("plan"):
        compilation = _compilation(name, graph, fork.recording, stages, choices.passes)
    page.compilations.append(compilation)
    say(f"scheduling for {choices.target.name}")
    step = scheduled(graph, choices.target, choices.plan, choices.policy)
    report = ScheduleReport(choices.by_name(model), step)
    steps: MeasuredSteps | None = None
    if measured:
        say("measuring steps")
        steps = ScheduledStep(report).measure().measured
    with page.timed("schedule"):
        page.schedule = step_data(report, steps)


def _comparison(result: Comparison, dtype: torch.dtype) -> dict[str, Any]:
    rows = result.to_json()
    values = [row for row in rows["rows"] if row["node"] not in result.shown]
    return rows | {
        "rows": values,
        "dtype": _named(dtype),
        "compilation": 0,
        "beside_fp32": any(row.beside_fp32 for row in result.rows),
    }


def _text_of(path: str) -> str:
    """Return the text of a source file, or nothing if it is gone."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
