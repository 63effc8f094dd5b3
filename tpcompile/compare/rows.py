"""One value beside what it should be: how far off it is, and whether that is only rounding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1.25e-3}
"""Largest error over the largest magnitude. fp32: the same sums in another order, in a model of
any depth. The others, where nothing in fp32 is at hand to judge by: two or three roundings of
the dtype (2^-8, 2^-11) in a layer, and in another order from layer to layer, so that the error
walks with the root of the depth. Models whose layers magnify errors go beyond that."""


@dataclass(frozen=True)
class Row:
    """One value: how far it is from the captured one."""

    node: str
    source: str
    layer: int | None
    max_abs: float
    rel: float
    ok: bool
    problem: str
    """Empty, or what is wrong beside the error: NaN, infinity, ranks that differ, a shape."""
    error: float
    """What is judged: `rel`, or, with `beside_fp32`, how far the value is from the one in fp32."""
    limit: float
    beside_fp32: bool = False

    @property
    def place(self) -> str:
        """Where in the value it is off, if that is known."""
        return ""

    @property
    def severity(self) -> float:
        """How near the error comes to its limit, where values have limits of their own."""
        return self.error / self.limit if self.beside_fp32 and self.limit else self.rel


def row_of(
    name: str,
    source: str,
    found: torch.Tensor,
    expected: torch.Tensor,
    tolerance: float | None = None,
    layer: int | None = None,
    ranks: list[torch.Tensor] | None = None,
    exact: torch.Tensor | None = None,
    depth: int = 0,
) -> Row:
    """One value beside what it should be; `ranks` are replicas, which must have the same bits.

    With the `exact` value, unless a tolerance is given, the question is not how far the value
    is from the expected one, but whether it is further from the exact one. Without it, `depth`
    is the number of layers that a value of a narrow dtype went through.
    """
    problem = _problem(found, expected, ranks or [])
    max_abs = rel = float("inf")
    if found.shape == expected.shape and found.numel():
        max_abs = float((found.double() - expected.double()).abs().max())
        rel = max_abs / _magnitude(expected)
    elif found.shape == expected.shape:
        max_abs = rel = 0.0
    error, limit = rel, _tolerance(expected.dtype, tolerance, depth)
    fp32 = exact is not None and tolerance is None and math.isfinite(rel) and found.numel() > 0
    if fp32 and exact is not None:
        error, limit = _distance(found, exact), rounding_limit(expected, exact)
    ok = not problem and error <= limit
    return Row(name, source, layer, max_abs, rel, ok, problem, error, limit, fp32)


def rounding_limit(expected: torch.Tensor, exact: torch.Tensor) -> float:
    """How far from fp32 a value may be, if it is rounded no worse than the captured one.

    Another order of sums rounds otherwise, and so is another draw of the same errors. Each token
    is a draw of its own: the root mean squares of two times `tokens` draws are in a proportion
    of 1 with a standard deviation of 1/sqrt(tokens) at most, of which three are allowed. A value
    that is exact by chance may still be rounded once, which moves it by a quarter of epsilon.
    """
    once = torch.finfo(expected.dtype).eps / 4
    return (1 + 3 / math.sqrt(max(len(expected), 1))) * max(_distance(expected, exact), once)


def token_margin(
    eager: torch.Tensor, exact: torch.Tensor | None, tolerance: float | None = None
) -> float:
    """Logits of eager that are this near, over the largest, may change places.

    With `exact` logits: eager's two may each be off by its largest error, and the compiled
    model's two by as much.
    """
    if tolerance is not None or exact is None:
        return _tolerance(eager.dtype, tolerance, 0)
    return 4 * float((eager.double() - exact.double()).abs().max()) / _magnitude(eager)


def _tolerance(dtype: torch.dtype, tolerance: float | None, depth: int) -> float:
    if tolerance is not None:
        return tolerance
    limit = TOLERANCES.get(dtype, 0.0)
    return limit if dtype == torch.float32 else limit * math.sqrt(1 + depth)


def _magnitude(x: torch.Tensor) -> float:
    return float(x.abs().max()) or 1.0


def _distance(x: torch.Tensor, exact: torch.Tensor) -> float:
    """The root mean square of the error over that of the value."""
    squares = [float(y.square().mean()) for y in (x.double() - exact.double(), exact.double())]
    return math.sqrt(squares[0] / (squares[1] or 1.0))


def _problem(found: torch.Tensor, expected: torch.Tensor, ranks: list[torch.Tensor]) -> str:
    if found.shape != expected.shape:
        return f"shape {tuple(found.shape)}, not {tuple(expected.shape)}"
    if bool(found.isnan().any()):
        return "NaN"
    if bool(found.isinf().any()):
        return "infinity"
    return "" if all(torch.equal(ranks[0], other) for other in ranks[1:]) else "ranks differ"
