"""Activations: torch's values, with the same bits for an element wherever it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch.nn import functional

from tpcompile.ir.ops.pointwise import gelu, sigmoid, silu, softplus

Function = Callable[[torch.Tensor], torch.Tensor]
FUNCTIONS: dict[str, tuple[Function, Function]] = {
    "silu": (silu, functional.silu),
    "sigmoid": (sigmoid, torch.sigmoid),
    "softplus": (softplus, functional.softplus),
    "gelu": (gelu, functional.gelu),
    "gelu_tanh": (
        partial(gelu, approximate="tanh"),
        partial(functional.gelu, approximate="tanh"),
    ),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EDGES = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 19.9, 20.1, 90.0, -90.0, 1e4, -1e4, torch.inf])


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def rows(width: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(width)
    return (4 * torch.randn(150, width, generator=generator)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_are_torch_s_in_fp64(name: str, dtype: torch.dtype) -> None:
    function, torch_s = FUNCTIONS[name]
    x = torch.cat([rows(64, dtype).flatten(), EDGES.to(dtype)])
    values = function(x)
    assert values.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(values.double(), torch_s(x.double()), rtol=4 * eps, atol=eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_bits_do_not_depend_on_the_place(name: str, dtype: torch.dtype, threads: int) -> None:
    """Torch's silu, sigmoid and softplus differ here in fp32."""
    function, _ = FUNCTIONS[name]
    for width in (8, 13, 59, 328, 1000):
        whole = function(rows(width, dtype))
        for first, end in ((0, 1), (3, 4), (0, 17), (5, 131), (1, 150)):
            part = function(rows(width, dtype)[first:end].clone())
            assert torch.equal(part, whole[first:end])
    pair = function(rows(26, dtype)[:, :13])  # rows that are not adjacent
    assert torch.equal(pair, function(rows(26, dtype))[:, :13])
