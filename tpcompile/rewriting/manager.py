"""The pass manager: it runs passes in order, checks the graph after each and records stages."""

from __future__ import annotations

import dataclasses
import logging
import re
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import MISSING, dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import fx

from tpcompile.errors import CompileError, PassError, UsageError, VerifyError
from tpcompile.inspect.notebook import graph_html
from tpcompile.ir.checker import Checker
from tpcompile.ir.info import info_of
from tpcompile.ir.module import StageModule
from tpcompile.ir.names import name_values
from tpcompile.ir.ops import ROTARY
from tpcompile.ir.pieces import Read
from tpcompile.ir.problem import Problem, merged
from tpcompile.ir.refusals import name_refusals
from tpcompile.ir.simulate import logits_of, materialise, run_ranks
from tpcompile.ir.text import format_graph
from tpcompile.pause import paused_collector
from tpcompile.registry import Registry
from tpcompile.rewriting.order import check_order, order_refusal
from tpcompile.rewriting.proving import Prover
from tpcompile.rewriting.reproducer import OnFailure, is_worth_reproducing, reproducer_of
from tpcompile.rewriting.rewrite import Report

log = logging.getLogger(__name__)


class Pass(Protocol):
    """Protocol of a pass: a frozen dataclass whose fields are its options."""

    name: ClassVar[str]

    def apply(self, gm: fx.GraphModule) -> Report:
        """Change the graph in place. The input is valid; the result must be valid too."""
        ...


PASSES: Registry[type[Pass]] = Registry("pass")
_Kind = TypeVar("_Kind", bound=type[Pass])


def graph_pass(kind: _Kind) -> _Kind:
    """Class decorator: register a pass under its name.

    Its class variables `after` and `before` declare its order relative to other passes; see
    `tpcompile.rewriting.order`.
    """
    check_options("pass", kind, "apply")
    PASSES.add(kind.name, kind)
    return kind


def check_options(noun: str, kind: Any, method: str) -> None:
    """Raise UsageError unless pipeline text can express this pass or pipeline and its options."""
    whole = dataclasses.is_dataclass(kind) and callable(getattr(kind, method, None))
    if not whole or not isinstance(getattr(kind, "name", None), str):
        raise UsageError(
            f"{kind.__name__} is not a valid {noun}",
            expected=f"a dataclass with a class variable name and a method {method}",
        )
    bare = [field.name for field in dataclasses.fields(kind) if field.default is MISSING]
    if bare:
        raise UsageError(
            f"The option {bare[0]} of the {noun} {kind.name} has no default",
            expected="a default for every option, so that the name alone is valid",
        )
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", kind.name):
        raise UsageError(
            f"The name of the {noun} {kind.name!r} is not valid",
            expected="lower-case letters and digits, in parts joined by '-'",
        )
    for option in dataclasses.fields(kind):
        if type(option.default) not in (bool, int, float, str):
            raise UsageError(
                f"The option {option.name} of the {noun} {kind.name} cannot be parsed from text",
                got=f"the default {option.default!r}",
                expected="a default that is a bool, int, float or str",
            )


@dataclass(frozen=True)
class Stats:
    """The cost and effect of one pass."""

    ms: float
    check_ms: float
    matches: int
    nodes_before: int
    nodes_after: int
    nearest: str = ""
    """The closest candidate that did not match, and the reason; empty without candidates."""
    proof_ms: float = 0.0
    unproved: str = ""
    """The reason why the values are not proved equal to those before the pass; "" if they are."""


@dataclass(repr=False)
class Stage:
    """A graph as it was after a pass.

    The graph is rebuilt from the captured graph on first access, so the captured graph must not
    change.
    """

    name: str
    text_form: str
    """The pass and its options as pipeline text; empty for the captured graph."""
    stats: Stats
    _replay: Callable[[], fx.GraphModule] = field(repr=False)

    def __repr__(self) -> str:
        label, stats = self.text_form or self.name, self.stats
        nodes = f"{stats.nodes_before} → {stats.nodes_after} nodes"
        return f"<stage {label}: {stats.matches} matches, {nodes}>"

    @cached_property
    def graph(self) -> fx.GraphModule:
        """A copy of the graph that callers may modify. Its parameters have shapes but no data."""
        return self._replay()

    def run(self, read: Read, **inputs: torch.Tensor) -> list[torch.Tensor]:
        """Return the logits on every simulated rank, with weights from `read(name, slices)`."""
        gm = self.graph
        tables = gm.get_submodule(ROTARY)
        with torch.inference_mode():
            values = run_ranks(gm, inputs, materialise(gm, read), tables)
        return logits_of(values)

    def text(self, rank: int | None = None) -> str:
        ranks = info_of(self.graph).tp
        if rank is not None and not 0 <= rank < ranks:
            raise UsageError(
                f"The graph has no rank {rank}", expected=f"a rank from 0 to {ranks - 1}"
            )
        return format_graph(self.graph, rank if ranks > 1 else None)

    def _repr_html_(self) -> str:
        """Show the graph in a notebook."""
        return graph_html(self.graph, f"{info_of(self.graph).name} after {self.name}")


class Stages(list[Stage]):
    """The stages of a compilation, of which a notebook or a prompt shows one per line."""

    def __repr__(self) -> str:
        return "\n".join(f"{place:3}  {stage!r}" for place, stage in enumerate(self))


Instrument = Callable[[str, fx.GraphModule, Stats], None]
"""Callback after capture and after each pass; it receives the name, the graph and its `Stats`."""


class FailedPassError(PassError, VerifyError):
    """The failure of a pass that left an invalid graph; `problems` lists the violations."""

    def __init__(self, name: str, message: str, stats: Stats, problems: Sequence[Problem]) -> None:
        super().__init__(message)
        self.reproducer = ""
        """The sentence that says how to run the pass again, if there is one."""
        first = problems[0]
        self.where = f"%{first.node} {first.source}"
        self.got, self.expected, self.hint = first.got, first.expected, first.hint
        self.name = name
        self.stats = stats
        self.problems = list(problems)


@paused_collector()
def run_passes(
    captured: fx.GraphModule,
    passes: Sequence[Pass],
    instruments: Sequence[Instrument] = (),
    done: Sequence[Pass] = (),
    on_failure: OnFailure | None = None,
    first: str = "capture",
    prover: Prover | None = None,
) -> tuple[fx.GraphModule, list[Stage]]:
    """Return the graph after all passes, and one stage for the captured graph and for each pass.

    Passes that violate their declared order are refused before any of them runs. To resume from a
    later graph than the captured one, pass it with the passes already `done`. If a pass fails,
    `on_failure` receives a reproducer; what it returns is added to the error.
    `first` is the name of the stage before the first pass. Instruments may read the expressions of
    a `prover` that is passed.
    """
    check_order(passes, done)
    checker, prover = Checker(), prover or Prover()
    for earlier in done:
        prover.declare(earlier)
    gm = clone(captured)
    stages = [_stage(first, "", Stats(0.0, 0.0, 0, 0, len(gm.graph.nodes)), captured, ())]
    for instrument in instruments:
        instrument(first, gm, stages[0].stats)
    for count, current in enumerate(passes, 1):
        try:
            stats = _run_one(current, gm, checker, prover, [*done, *passes[: count - 1]])
        except Exception as error:
            if on_failure is not None and is_worth_reproducing(error):
                before = format_graph(stages[-1].graph)
                left = ",".join(map(describe, passes[count - 1 :]))
                _add_sentence(error, on_failure(reproducer_of(before, left, error)))
            raise
        stages.append(_stage(current.name, describe(current), stats, captured, passes[:count]))
        log.info(
            "%s: %d matches, %d → %d nodes, %.1f ms",
            describe(current),
            stats.matches,
            stats.nodes_before,
            stats.nodes_after,
            stats.ms + stats.check_ms,
        )
        for instrument in instruments:
            instrument(current.name, gm, stats)
    return gm, stages


def _add_sentence(error: Exception, sentence: str) -> None:
    if isinstance(error, FailedPassError):
        error.reproducer = sentence
    if isinstance(error, CompileError):
        message = str(error)
        space = "\n" if "\n" in message else " "
        error.args = (f"{message}{space}{sentence}".rstrip(),)
    elif sentence:
        error.add_note(sentence)


def _run_one(
    current: Pass, gm: fx.GraphModule, checker: Checker, prover: Prover, done: Sequence[Pass]
) -> Stats:
    before = len(gm.graph.nodes)
    reading = time.perf_counter()
    prover.before(gm, current)
    started = time.perf_counter()
    try:
        report = _apply(current, gm)
    except CompileError as error:
        order = order_refusal(current, [before.name for before in done])
        place = f"(In the pass {describe(current)}, {_history(done)}.)"
        error.args = (" ".join(filter(None, (str(error), order, place))),)
        raise
    except Exception as error:
        error.add_note(f"in the pass {describe(current)}, {_history(done)}")
        raise
    if not isinstance(report, Report):
        raise PassError(
            f"The pass {describe(current)} returned {report!r}",
            expected="a Report with its number of matches",
        )
    ran = time.perf_counter()
    problems = checker.check(gm)
    checked = time.perf_counter()
    stats = Stats(
        ms=(ran - started) * 1e3,
        check_ms=(checked - ran) * 1e3,
        matches=report.matches,
        nodes_before=before,
        nodes_after=len(gm.graph.nodes),
        nearest=str(report.nearest or ""),
    )
    if problems:
        message = f"The pass {describe(current)} left an invalid graph ({_history(done)})"
        raise FailedPassError(current.name, message + _listed(problems), stats, problems)
    wrong, unproved = prover.after(gm, current)
    proving = started - reading + time.perf_counter() - checked
    stats = dataclasses.replace(stats, proof_ms=proving * 1e3, unproved=unproved)
    if wrong is not None:
        message = f"The pass {describe(current)} changes what the graph computes"
        listed = f" ({_history(done)}){_listed([wrong])}"
        raise FailedPassError(current.name, message + listed, stats, [wrong])
    return stats


def _apply(current: Pass, gm: fx.GraphModule) -> Report:
    """Run a pass, and name its new values and its refusals."""
    known = set(gm.graph.nodes)
    report = current.apply(gm)
    name_values(gm.graph, known)
    name_refusals(gm.graph, current.name)
    return report


def _history(done: Sequence[Pass]) -> str:
    return "after " + ", ".join(map(describe, done)) if done else "the first pass"


def _listed(problems: Sequence[Problem], most: int = 3) -> str:
    different = merged(problems)
    shown = "\n  ".join(map(str, different[:most]))
    remaining = f"\n  and {len(different) - most} other problems" if len(different) > most else ""
    return f":\n  {shown}{remaining}"


def _stage(
    name: str,
    text: str,
    stats: Stats,
    captured: fx.GraphModule,
    passes: Sequence[Pass],
) -> Stage:
    def replay() -> fx.GraphModule:
        checker = Checker()
        gm = clone(captured)
        for current in passes:
            _apply(current, gm)
            checker.check(gm)  # sets the types that the next pass reads
        return gm

    return Stage(name, text, stats, replay)


def clone(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of the graph that shares the parameters, which have shapes but no data."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        values[node] = graph.node_copy(node, values.__getitem__)
    copied = StageModule(gm, graph)
    copied.meta["tpcompile"] = copy(info_of(gm))
    return copied


def describe(current: Pass) -> str:
    """Return the pass as pipeline text, with its non-default options."""
    options = [
        f"{option.name}={getattr(current, option.name)}"
        for option in dataclasses.fields(current)  # type: ignore[arg-type]
        if getattr(current, option.name) != option.default
    ]
    return current.name + ("{" + ",".join(options) + "}" if options else "")
