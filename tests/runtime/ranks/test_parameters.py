"""Tests of the memory of a rank's parameters."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.runtime.ranks.tiny_ranks import modules
from tpcompile.backends.torch_tp import Storage, as_matrix
from tpcompile.errors import RankError
from tpcompile.ir.recipe import Tensor
from tpcompile.runtime.ranks import parameters
from tpcompile.runtime.ranks.parameters import Parameters, Places
from tpcompile.runtime.ranks.rank import LocalParameter, RankModule

CPU = torch.device("cpu")
KINDS = {
    "rows": (Tensor("rows", (7, 96)), torch.float32, Storage.ROWS),
    "none": (Tensor("none", (0, 96)), torch.float32, Storage.ROWS),
    "matrix": (Tensor("matrix", (8192, 2048)), torch.bfloat16, Storage.MATRIX),
    "both": (Tensor("both", (5,)), torch.float64, Storage.BOTH),
}
VALUES = {name: torch.randn(kind[0].shape) for name, kind in KINDS.items()}


def _module() -> RankModule:
    (module,) = modules(1, "return x")
    kinds = {name: LocalParameter(*kind) for name, kind in KINDS.items()}
    return replace(module, parameters=kinds)


def test_places_are_apart() -> None:
    places = Places.of(_module())
    starts = [start for start, _, _ in places.by_name.values()]
    ends = [starts[1], starts[2], starts[3], places.size]
    for (name, kind), start, end in zip(KINDS.items(), starts, ends, strict=True):
        assert end - start >= VALUES[name].numel() * kind[1].itemsize


def test_parameters_have_the_values_of_their_recipes() -> None:
    module = _module()
    for how in ("evaluated", "copied"):
        memory = Parameters(module, CPU)
        for name, (_, dtype, storage) in KINDS.items():
            value = VALUES[name].to(dtype)
            parameter = (
                memory.copy(name, value)
                if how == "copied"
                else memory.evaluate(name, lambda name, index: VALUES[name][index])
            )
            assert parameter.dtype == dtype
            if storage is Storage.MATRIX:
                assert parameter.is_mkldnn == as_matrix(value).is_mkldnn
                parameter = parameter.to_dense() if parameter.is_mkldnn else parameter
            assert torch.equal(parameter, value)


def test_a_parameter_with_another_order_is_not_kept_twice() -> None:
    """Its pages are freed; those of the others are not."""
    memory = Parameters(_module(), CPU)
    before = _resident()
    parameter = memory.evaluate("matrix", lambda name, index: VALUES[name][index])
    size = VALUES["matrix"].numel() * 2
    assert _resident() - before < (1.5 * size if parameter.is_mkldnn else 2.5 * size)


def test_too_little_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(parameters, "zeros", refuse)
    with pytest.raises(RankError, match=r"not enough memory for the weights. At rank 0. .*34 MB"):
        Parameters(_module(), CPU)


def _resident() -> int:
    """Return the anonymous memory of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024
