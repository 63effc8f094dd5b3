"""The distance of a value from its expected value, and the distance that rounding explains."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1.25e-3}
"""The largest error, divided by the largest magnitude. fp32: the same sums in another order, in a
model of any depth. bf16 and fp16, used if there is no reference in fp32: two or three roundings
of the dtype (2^-8, 2^-11) per layer, in another order from layer to layer, so the error is a
random walk that grows with the square root of the depth. Models whose layers amplify errors
exceed these limits."""


@dataclass(frozen=True)
class Row:
    """A compared value, and its distance from the expected one."""

    node: str
    source: str
    layer: int | None
    max_abs: float
    rel: float
    ok: bool
    problem: str
    """A problem other than the error: NaN, infinity, ranks that differ, a wrong shape; or empty."""
    error: float
    """The error compared with `limit`: `rel`, or with `beside_fp32` the distance from fp32."""
    limit: float
    beside_fp32: bool = False
    eager_error: float = 0.0
    """With `beside_fp32`, the distance of the expected value from fp32."""

    @property
    def place(self) -> str:
        """The position of the divergence within the value, if known."""
        return ""

    @property
    def severity(self) -> float:
        """The error as a fraction of its limit if values have their own limits, else `rel`."""
        return self.error / self.limit if self.beside_fp32 and self.limit else self.rel


def row_of(
    name: str,
    source: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    tolerance: float | None = None,
    layer: int | None = None,
    ranks: list[torch.Tensor] | None = None,
    exact: torch.Tensor | None = None,
    depth: int = 0,
) -> Row:
    """Compare a value with the expected one; `ranks` are replicas, which must be equal.

    With an `exact` value and no tolerance, a value passes if its distance from the exact value is
    within `rounding_limit`. Otherwise, `depth` is the number of layers before a value of a narrow
    dtype.
    """
    problem = _problem(actual, expected, ranks or [])
    max_abs = rel = float("inf")
    if actual.shape == expected.shape and actual.numel():
        max_abs = float((actual.double() - expected.double()).abs().max())
        rel = max_abs / _magnitude(expected)
    elif actual.shape == expected.shape:
        max_abs = rel = 0.0
    error, limit = rel, _tolerance(expected.dtype, tolerance, depth)
    fp32 = exact is not None and tolerance is None and math.isfinite(rel) and actual.numel() > 0
    expected_error = 0.0
    if fp32 and exact is not None:
        error, limit = _distance(actual, exact), rounding_limit(expected, exact)
        expected_error = _distance(expected, exact)
    ok = not problem and error <= limit
    return Row(name, source, layer, max_abs, rel, ok, problem, error, limit, fp32, expected_error)


def rounding_limit(expected: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest distance from fp32 that is attributed to rounding.

    Another order of sums rounds differently, so it is another sample of the same errors. Each token
    is one sample. For two sets of `tokens` samples, the ratio of the root mean squares is 1 with a
    standard deviation of at most 1/sqrt(tokens); three standard deviations are allowed. A value
    that is exact by chance may still be rounded once, which moves it by a quarter of epsilon. One
    in fp32, of a model that rounds activations, may be a sum in another order.
    """
    wide = expected.dtype == torch.float32
    least = TOLERANCES[expected.dtype] if wide else torch.finfo(expected.dtype).eps / 4
    return (1 + 3 / math.sqrt(max(len(expected), 1))) * max(_distance(expected, exact), least)


def token_margin(
    eager: torch.Tensor, exact: torch.Tensor | None, tolerance: float | None = None
) -> float:
    """Return the distance within which rounding may swap two logits of eager.

    It is relative to the largest logit. With `exact` logits, each of eager's two logits may be off
    by eager's largest error, and each of the compiled model's two by as much.
    """
    if tolerance is not None or exact is None:
        return _tolerance(eager.dtype, tolerance, 0)
    return 4 * float((eager.double() - exact.double()).abs().max()) / _magnitude(eager)


def _tolerance(dtype: torch.dtype, tolerance: float | None, depth: int) -> float:
    if tolerance is not None:
        return tolerance
    limit = TOLERANCES.get(dtype, 0.0)
    return limit if dtype == torch.float32 else limit * math.sqrt(1 + depth)


def _magnitude(values: torch.Tensor) -> float:
    return float(values.abs().max()) or 1.0


def _distance(values: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the root mean square of the error, divided by that of the exact value."""
    squares = [
        float(tensor.square().mean())
        for tensor in (values.double() - exact.double(), exact.double())
    ]
    return math.sqrt(squares[0] / (squares[1] or 1.0))


def _problem(actual: torch.Tensor, expected: torch.Tensor, ranks: list[torch.Tensor]) -> str:
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if bool(actual.isnan().any()):
        return "NaN"
    if bool(actual.isinf().any()):
        return "infinity"
    return "" if all(torch.equal(ranks[0], other) for other in ranks[1:]) else "ranks differ"
