"""Results are bitwise equal on 1, 2, 4 and 8 ranks if heads and widths divide evenly."""

from __future__ import annotations

import pytest
import torch

from tests.backends.reference.step_models import EVEN
from tests.backends.reference.stepping import Case, steps_on, worst_error
from tests.models import TOLERANCE, relative_error
from tpcompile.backends.executor import EXECUTORS, Executor
from tpcompile.backends.reference import Machine, shuffled
from tpcompile.ir.layout import Layout
from tpcompile.ir.meta import value_type
from tpcompile.passes.cache_kv import CACHE
from tpcompile.vm.program import Role

STEPS = 3
NEARLY = 1e-5
"""The tolerance in fp32 if only the order of sums differs."""


def _on(
    case: Case, whole: torch.Tensor, kind: type[Executor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Run the steps, each rank with its heads of the cache; return logits and final caches."""
    node = next(node for node in case.graph.graph.nodes if node.name == CACHE)
    layout = value_type(node).layout_of(3)
    held = [list(range(8))] if layout is None else _heads(layout, case.tp)
    executor = kind(case.memory())
    for cache, heads in zip(executor.memory.values(Role.CACHE), held, strict=True):
        cache.copy_(whole[:, :, :, heads])
    options = (lambda step: (shuffled(step),)) if kind is Machine else lambda step: ()
    logits, caches = steps_on(executor, case, STEPS, options), executor.memory.values(Role.CACHE)
    executor.close()
    return logits, caches


def _heads(layout: object, tp: int) -> list[list[int]]:
    assert isinstance(layout, Layout)
    return [layout.units_of(rank) for rank in range(tp)]


_KINDS = [
    pytest.param(kind, id=name, marks=() if kind.same_for_ranks else pytest.mark.slow)
    for name, kind in EXECUTORS.items()
]


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("lowering", ["heads", "rows"])
def test_bits_do_not_depend_on_the_ranks(kind: type[Executor], lowering: str) -> None:
    """Executors that do not promise this give nearly the same results."""
    alone = Case(EVEN, lowering=lowering, spans=3)
    whole = alone.machine().memory.values(Role.CACHE)[0]
    wanted, wanted_caches = _on(alone, whole.clone(), kind)
    assert worst_error(alone, wanted) < TOLERANCE
    for tp in (2, 4, 8) if kind.same_for_ranks else (2,):
        for splits in (1, 8 // tp):
            case = Case(EVEN, tp, lowering=lowering, spans=3, column_splits=splits)
            actual, caches = _on(case, whole, kind)
            if not kind.same_for_ranks:
                assert relative_error(torch.stack(actual), torch.stack(wanted)) < NEARLY
                continue
            assert all(torch.equal(a, b) for a, b in zip(actual, wanted, strict=True)), (tp, splits)
            together = torch.cat(caches, 3)
            assert torch.equal(together.nan_to_num(7.0), wanted_caches[0].nan_to_num(7.0))
