"""Tests of the integers and scales of weights."""

from __future__ import annotations

import pytest
import torch

from tpcompile.ir.format import Format, Kind
from tpcompile.ir.quantize import quantized

FORMATS = ("int4:16:bf16", "int4:48:f32", "int4:row:f16", "int8:32:bf16", "int8:row:f32")


def _weight(rows: int = 12, columns: int = 96) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(rows, columns, generator=generator) * 0.02


def _decoded(parts: dict[str, torch.Tensor], stored: Format, columns: int) -> torch.Tensor:
    return stored.decoded(parts, (0, columns), torch.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_the_best_scale_of_those_that_are_tried(name: str) -> None:
    """The sum of squares is computed here in fp64, group by group."""
    stored, weight = Format.parsed(name), _weight()
    parts = quantized(weight, stored)
    values, scales = stored.components
    assert parts[values.suffix].dtype == values.dtype.torch
    assert parts[scales.suffix].dtype == scales.dtype.torch
    decoded = _decoded(parts, stored, 96)
    groups, dtype = weight.unflatten(1, (-1, scales.columns or 96)), scales.dtype.torch
    four = stored.kind == Kind.INT4
    low, high = (-8, 7) if four else (-127, 127)
    errors = []
    for steps in (-8.0, -8.5, -9.0) if four else (127.0,):
        extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True))
        scale = ((extreme if four else extreme.abs()) / steps).to(dtype).double()
        integers = (groups.double() / scale).round().clamp(low, high)
        errors.append((integers * scale - groups).square().sum(2))
    best = torch.stack(errors).amin(0)
    error = (decoded - weight).double().square().unflatten(1, groups.shape[1:]).sum(2)
    assert torch.allclose(error, best, rtol=1e-4)


def test_the_search_gains() -> None:
    """The largest value over 7 has about 1.4 times the squared error."""
    stored, weight = Format.parsed("int4:64:bf16"), _weight(256, 512)
    decoded = _decoded(quantized(weight, stored), stored, 512)
    groups = weight.unflatten(1, (-1, 64))
    scale = (groups.abs().amax(2, keepdim=True) / 7).bfloat16().float()
    plain = ((groups / scale).round().clamp(-8, 7) * scale).flatten(1)
    ratio = (decoded - weight).square().sum() / (plain - weight).square().sum()
    assert 0.69 < ratio < 0.74


@pytest.mark.parametrize("name", FORMATS)
def test_rows_and_groups_do_not_depend_on_others(name: str) -> None:
    stored, weight = Format.parsed(name), _weight()
    whole = quantized(weight, stored)
    for rows in ((0, 1), (5, 12)):
        part = quantized(weight[slice(*rows)], stored)
        assert all(torch.equal(part[key], values[slice(*rows)]) for key, values in whole.items())
    if group := stored.components[1].columns:
        part = quantized(weight[3:4, group : 2 * group], stored)
        for component in stored.components:
            start, stop = component.span(group, 2 * group)
            assert torch.equal(part[component.suffix], whole[component.suffix][3:4, start:stop])


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_and_tiny_values(name: str) -> None:
    stored, weight = Format.parsed(name), torch.zeros(2, 96)
    weight[1] = 1e-41
    decoded = _decoded(quantized(weight, stored), stored, 96)
    assert torch.equal(decoded, torch.zeros(2, 96))


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e9])
def test_scales_show_values_that_are_not_finite(value: float) -> None:
    """1e9 is too large for a scale in fp16."""
    weight = _weight()
    weight[3, 5] = value
    for name in ("int4:row:f16", "int8:16:f16"):
        scales = quantized(weight, Format.parsed(name))["_scale"]
        assert int((~scales.isfinite()).sum()) == 1
