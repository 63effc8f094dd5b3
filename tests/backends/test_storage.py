"""Parameters are stored once, unless their storage requires a second copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tpcompile
from tests.models import scaled_config
from tpcompile.backends.torch_tp import Storage, matrix, storages_of
from tpcompile.passes import default_pipeline, run_passes
from tpcompile.runtime.model import CompiledModel
from tpcompile.runtime.ranks.in_process import InProcessRanks
from tpcompile.runtime.ranks.program import ProgramRanks
from tpcompile.runtime.ranks.rank import Rank
from tpcompile.vm.program import Role

pytestmark = pytest.mark.usefixtures("captured_once")


def _config(*, tied: bool) -> Any:
    return scaled_config("tiny-qwen3", tie_word_embeddings=tied)


def _graph(dtype: torch.dtype, *, tied: bool) -> torch.fx.Graph:
    captured = tpcompile.capture(_config(tied=tied), dtype=dtype)
    return run_passes(captured, default_pipeline(2))[0].graph


@pytest.mark.parametrize("tied", [True, False])
def test_what_only_linears_read_may_be_reordered(*, tied: bool) -> None:
    graph = _graph(torch.bfloat16, tied=tied)
    storages = storages_of(graph)
    for parameter, storage in storages.items():
        if parameter == "embed_tokens_weight":
            wanted = Storage.BOTH if tied else Storage.ROWS
        else:
            linear = parameter.endswith(("proj_weight", "lm_head_weight"))
            wanted = Storage.MATRIX if linear else Storage.ROWS
        assert storage is wanted, parameter
    assert set(storages_of(graph, programs=True).values()) == {Storage.ROWS}
    assert set(storages_of(_graph(torch.float32, tied=tied)).values()) == {Storage.ROWS}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_modules_and_programs_share_every_weight(
    tp: int, monkeypatch: pytest.MonkeyPatch, *, tied: bool
) -> None:
    """Modules and programs share all weights, even on a CPU that prefers reordered weights."""
    bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    monkeypatch.setattr(matrix, "_reorders", lambda dtype: bf16 and dtype == torch.bfloat16)
    with _compiled(tp, "reference", tied=tied) as model:
        model.generate(torch.tensor([[5, 9, 2]]), max_new_tokens=3)
        outer = model._ranks
        assert isinstance(outer, ProgramRanks)
        ranks = _ranks(model)
        memory = next(iter(outer._modules._executors._executors.values())).memory  # type: ignore[attr-defined]
        shared = 0
        for buffer, tensor in zip(memory.program.buffers, memory.tensors, strict=True):
            if buffer.role == Role.WEIGHT:
                weight = ranks[buffer.rank]._weights[buffer.name]
                assert tensor.data_ptr() == weight.data_ptr(), buffer.name
                shared += 1
        assert shared == sum(len(rank._weights) for rank in ranks)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("reorders", [True, False])
def test_only_a_tied_head_is_held_twice_and_only_if_reordered(
    tp: int, monkeypatch: pytest.MonkeyPatch, *, reorders: bool
) -> None:
    if reorders and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no kernels for reordered weights")
    monkeypatch.setattr(matrix, "_reorders", lambda dtype: reorders and dtype == torch.bfloat16)
    with _compiled(tp, "torch", tied=True) as model:
        for rank in _ranks(model):
            held = {weight.data_ptr() for weight in rank._weights.values() if not weight.is_mkldnn}
            copies = [
                name
                for module in rank._loaded.modules()
                for name, value in vars(module).items()
                if isinstance(value, torch.Tensor)
                and (value.is_mkldnn or value.data_ptr() not in held)
            ]
            assert copies == (["embed_tokens_weight_matrix"] if reorders else [])


def _compiled(tp: int, backend: str, *, tied: bool) -> CompiledModel:
    return tpcompile.compile(
        _config(tied=tied),
        tp=tp,
        backend=backend,
        dtype=torch.bfloat16,
        random_weights=0,
        simulate=True,
        max_seq_len=64,
    )


def _ranks(model: CompiledModel) -> list[Rank]:
    ranks = model._ranks
    modules = ranks._modules if isinstance(ranks, ProgramRanks) else ranks
    assert isinstance(modules, InProcessRanks)
    return modules._ranks
