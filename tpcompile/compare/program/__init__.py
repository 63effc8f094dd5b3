"""The comparison of a program with Hugging Face eager and the torch module, group by group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tpcompile.backends.executor import EXECUTORS
from tpcompile.backends.reference.orders import shuffled
from tpcompile.compare.comparison import Comparison
from tpcompile.compare.program.case import Batch, Case, prepare
from tpcompile.passes import Pass
from tpcompile.vm.lowering import StepPlan
from tpcompile.vm.schedule.scheduled import scheduled
from tpcompile.vm.targets import target_of

__all__ = ["Batch", "Case", "compare_program", "plan_for", "prepare"]


def compare_program(
    model: Any,
    passes: Sequence[Pass],
    batch: Batch,
    *,
    workers: int = 4,
    lowering: str = "heads",
    backend: str = "reference",
    **options: Any,
) -> Comparison:
    """Decode some steps on prefilled caches with all three sides; `options` are for `prepare`.

    Eager fills its own caches. The program starts with copies of the torch module's. It runs on
    the reference machine, and on `backend` if that is another executor.
    """
    kind = EXECUTORS[backend]
    kind.prepare()
    case = prepare(model, passes, batch, **options)
    plan = plan_for(case, workers, lowering)
    schedule = scheduled(case.graph, target_of("cpu", workers), plan)
    compared = case.against(schedule.proved, shuffled(batch.seed), kind)
    return replace(compared, proofs=replace(compared.proofs, program=schedule.computed))


def plan_for(case: Case, workers: int, lowering: str = "heads") -> StepPlan:
    """Return a plan with room for the sequences of the case, and at least one block per span."""
    texts = case.steps[0].texts
    return StepPlan(
        workers,
        batch=len(texts.tokens),
        max_seq_len=max(case.longest, case.structure.spans * texts.block),
        context=max(texts.lengths),
        lowering=lowering,
        steps=1,
    )
