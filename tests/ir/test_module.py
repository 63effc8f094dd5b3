"""Stage modules generate their code when first called, and again after their graph changes."""

from __future__ import annotations

import copy

import torch
from torch import fx

from tpcompile.ir.module import StageModule


def _doubled() -> StageModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.aten.mul.Tensor, (x, 2)))
    return StageModule({}, graph)


def test_it_runs_and_shows_its_code() -> None:
    gm = _doubled()
    assert gm(torch.tensor(3)).item() == 6
    assert "aten.mul" in _doubled().code


def test_a_changed_graph_is_run_after_recompile() -> None:
    gm = _doubled()
    gm(torch.tensor(3))
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    node.update_arg(1, 5)
    gm.recompile()
    assert "5" in gm.code
    assert gm(torch.tensor(3)).item() == 15


def test_two_modules_do_not_share_their_python() -> None:
    first, second = _doubled(), _doubled()
    first(torch.tensor(1))
    next(n for n in second.graph.nodes if n.op == "call_function").update_arg(1, 7)
    second.recompile()
    assert (first(torch.tensor(1)).item(), second(torch.tensor(1)).item()) == (2, 7)


def test_a_copy_runs() -> None:
    assert copy.deepcopy(_doubled())(torch.tensor(4)).item() == 8


def test_an_interpreter_takes_it() -> None:
    assert fx.Interpreter(_doubled()).run(torch.tensor(4)).item() == 8
