"""The same bits on 1, 2, 4 and 8 ranks, where heads and widths divide evenly."""

from __future__ import annotations

import pytest
import torch

from tests.backends.reference.stepping import EVEN, Case, tables_of, texts, worst_error
from tests.models import TOLERANCE
from tpcompile.backends.reference import Machine, shuffled
from tpcompile.ir.layout import Layout
from tpcompile.ir.meta import value_type
from tpcompile.passes.cache_kv import CACHE
from tpcompile.vm.program import Role

STEPS = 3


def _ran(machine: Machine, case: Case) -> list[torch.Tensor]:
    """The logits of each step, and the cache that is left, heads in order."""
    rows, tables = texts(case.model, case.lengths), tables_of(case.lengths)
    found = []
    for step in range(STEPS):
        lengths = torch.tensor(case.lengths) + step
        tokens = [row[length - 1] for row, length in zip(rows, lengths.tolist(), strict=True)]
        machine.place(torch.stack(tokens), lengths, tables)
        machine.run(1, shuffled(step))
        found.append(machine.logits.clone())
    return found


def _on(case: Case, whole: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The steps on the ranks of a case, each with its heads of one cache; and the caches then."""
    kind = value_type(next(node for node in case.graph.graph.nodes if node.name == CACHE))
    layout = kind.layout_of(3)
    held = [list(range(8))] if layout is None else _heads(layout, case.tp)
    machine = case.machine()
    for own, heads in zip(machine.memory.values(Role.CACHE), held, strict=True):
        own.copy_(whole[:, :, :, heads])
    return _ran(machine, case), machine.memory.values(Role.CACHE)


def _heads(layout: object, tp: int) -> list[list[int]]:
    assert isinstance(layout, Layout)
    return [layout.held(rank) for rank in range(tp)]


@pytest.mark.parametrize("lowering", ["heads", "rows"])
def test_bits_do_not_depend_on_the_ranks(lowering: str) -> None:
    alone = Case(EVEN, lowering=lowering, spans=3)
    whole = alone.machine().memory.values(Role.CACHE)[0]
    wanted, kept = _on(alone, whole.clone())
    assert worst_error(alone, wanted) < TOLERANCE
    for tp in (2, 4, 8):
        for splits in (1, 8 // tp):
            case = Case(EVEN, tp, lowering=lowering, spans=3, column_splits=splits)
            found, caches = _on(case, whole)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), (tp, splits)
            together = torch.cat(caches, 3)
            assert torch.equal(together.nan_to_num(7.0), kept[0].nan_to_num(7.0))
