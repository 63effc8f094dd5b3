"""Gates and decays of modules have the same bits for any number of tokens in a step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tpcompile.backends.native import functions as native
from tpcompile.backends.torch_tp import functions as torchs
from tpcompile.ir.ops import DELTA_DECAY, GATED_RMS_NORM, SIGMOID_GATE

HEADS, WIDTH = 3, 8
VALUES = torch.randn(300, HEADS, WIDTH, generator=torch.Generator().manual_seed(1)) * 3
NORM, RATE = torch.linspace(0.5, 1.5, WIDTH), torch.linspace(-1, 1, WIDTH)
CALLS: dict[str, tuple[Callable[..., torch.Tensor], tuple[object, ...], bool]] = {
    "sigmoid_gate": (SIGMOID_GATE, (), True),
    "gated_rms_norm": (GATED_RMS_NORM, (NORM, 1e-6), True),
    "delta_decay": (DELTA_DECAY, (RATE, RATE), False),
}
"""The op of each function, its other operands, and whether values are gated by themselves."""


@pytest.mark.parametrize("functions", [torchs, native], ids=["torch", "native"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_depends_on_no_other(functions: object, name: str, dtype: torch.dtype) -> None:
    op, others, gated = CALLS[name]

    def call(function: Callable[..., torch.Tensor], values: torch.Tensor) -> torch.Tensor:
        return function(values, *([values] if gated else []), *others)

    steady, values = getattr(functions, name), VALUES.to(dtype)
    whole = call(steady, values)
    assert torch.allclose(whole, call(op, values), rtol=1e-6 if dtype.itemsize > 2 else 1e-2)
    for count in range(1, 60):
        assert torch.equal(call(steady, values[:count].clone()), whole[:count])
        assert torch.equal(call(steady, values[-count:].clone()), whole[-count:])
