"""Mistakes to inject: changed instructions, operands and weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.compare.program.cases import QWEN3, case_of, lowered_of
from tests.compare.program.wrong import Mistaken, Spoilt
from tpcompile.ir.ops.decode import span_of
from tpcompile.ir.ops.rotary import rope
from tpcompile.vm.groups import AllReduce, PartialAttention, attention
from tpcompile.vm.groups.arithmetic import rms_norm
from tpcompile.vm.groups.qkv_operands import QkvOperands
from tpcompile.vm.groups.residual import Site
from tpcompile.vm.program.instruction import NONE, Range

Tensors = list[torch.Tensor]


def site(which: Site) -> Callable[[Any], bool]:
    return lambda one: one.at.site == which


def eps(number: float) -> Callable[[Any], Any]:
    return lambda at: replace(at.normed, eps=number)


def normed_with(name: str, model: str = QWEN3, tp: int = 3) -> Callable[[Any], Any]:
    """Replace the norm's weight with this one."""
    return lambda at: replace(at.normed, weight=lowered_of(model, tp).numbers(name)[0] + at.rank)


def norm_of_slices(
    x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool = False
) -> torch.Tensor:
    """Normalise each slice of eight elements of a head separately."""
    parts = zip(x.split(8, -1), weight.split(8), strict=True)
    return torch.cat([rms_norm(part, scale, eps, zero_centered) for part, scale in parts], -1)


def not_turned(x: torch.Tensor, *tables: torch.Tensor, **options: Any) -> torch.Tensor:
    return x


def turned_back(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **options: Any
) -> torch.Tensor:
    return rope(x, cos, -sin, **options)


def other_positions(by: int) -> Callable[[Tensors, Any], None]:
    def change(memory: Tensors, at: Any) -> None:
        memory[at.positions] = memory[at.positions] + by

    return change


def one_slot_off(at: QkvOperands, memory: Tensors) -> Any:
    for row, length in enumerate(memory[at.lengths].tolist()):
        held, place = divmod(length, at.block)
        yield row, int(memory[at.tables][row, held]) * at.block + place


def sides_swapped(memory: Tensors, at: Any) -> None:
    memory[at.out] = memory[at.out].flip(1)


def swapped_back(memory: Any, other: Tensors, at: Any) -> None:
    memory[at.out].copy_(other[at.out].flip(1))


def layers_swapped(memory: Tensors, at: Any) -> None:
    memory[at.out] = memory[at.out].flip(0)


def layers_back(memory: Any, other: Tensors, at: Any) -> None:
    memory[at.out].copy_(other[at.out].flip(0))


def spanned(change: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `attend_span` to change its partials."""
    right = attention.attend_span

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Any:
        values, lse = right(q, k, v, scale)
        return change(values, lse, q, k, scale)

    return attend


def without_maximum(values: Any, lse: Any, q: Any, k: Any, scale: float) -> Any:
    return values, lse - (q @ k.transpose(0, 1) * scale).amax(-1)


def in_base_two(values: Any, lse: Any, *rest: Any) -> Any:
    return values, lse / torch.tensor(2.0).log()


def without_the_new(length: int, block: int, span: int, spans: int, window: int | None) -> Any:
    first, last = span_of(length, block, span, spans, window)
    return first, last - (last == length and last > first)


def one_token_twice(length: int, block: int, span: int, spans: int, window: int | None) -> Any:
    first, last = span_of(length, block, span, spans, window)
    return first, last + (span == 0 and first < last < length)


@dataclass(frozen=True)
class CountsEmpty(PartialAttention):
    """Attention that gives an empty span a weight."""

    def run(self, memory: Any, probe: Any = None) -> None:
        super().run(memory, probe)
        memory[self.at.lse][self.sequences.slice, self.heads.slice, self.span.slice].nan_to_num_(
            neginf=0.0
        )


def equal_weights(one: Any, other: Any, **functions: Any) -> Any:
    return (one[0] + other[0]) / 2, torch.maximum(one[1], other[1])


def overwritten(one: Any, other: Any, **functions: Any) -> Any:
    """Keep only the last span."""
    return other


def plus_residual(share: float) -> Callable[[Any], Any]:
    """Add a share of the residual to each rank's partial sum."""

    def change(one: Any) -> Any:
        summed = next(
            other
            for other in lowered_of(QWEN3, 3).instructions
            if isinstance(other, AllReduce)
            and (other.layer, other.rank, other.at.site) == (one.layer, one.rank, one.at.site)
        )
        return WithResidual(one, summed.at.residual, share)

    return change


@dataclass(frozen=True)
class WithResidual(Mistaken):
    """Instruction whose partial sums include a share of the residual."""

    residual: int = NONE
    share: float = 1.0

    def run(self, memory: Any, probe: Any = None) -> None:
        self.one.run(memory, probe)
        one: Any = self.one
        out = memory[one.at.out]
        out[one.terms.slice, one.rows.slice] += (
            self.share * memory[self.residual][:, one.rows.slice]
        )


def halves_swapped(held: Tensors) -> Tensors:
    return [torch.cat(weight.chunk(2)[::-1]) for weight in held]


def ranks_swapped(held: Tensors) -> Tensors:
    return [held[1], held[0], *held[2:]]


def scrambled(held: Tensors) -> Tensors:
    """Reshape the transpose: the shape is right, the values are permuted."""
    return [weight.t().reshape(weight.shape) for weight in held]


def straight(held: Tensors) -> Tensors:
    """Use the checkpoint's order, although interleaved heads need a permuted weight."""
    return case_of(QWEN3, 3).weights["l1_q_norm_weight"]


def as_often_as_ranks(held: Tensors) -> Tensors:
    return [bias * len(held) for bias in held]


def one_row_off(memory: Tensors, at: Any) -> None:
    memory[at.weight] = memory[at.weight].roll(1, 0)


def last_of_equals(memory: Tensors, at: Any) -> None:
    """Reverse all slots, so that the last of several maxima wins."""
    for rank in range(at.ranks):
        for first in (at.best, at.ids):
            memory[first + rank] = memory[first + rank].flip(1)
    for first in (at.best, at.ids):
        held = memory[first : first + at.ranks]
        memory[first : first + at.ranks] = held[::-1]


def fewer_columns(one: Any) -> Any:
    """Round the width down to a multiple of eight, and drop the rest."""
    return replace(one, columns=Range(one.columns.start, one.columns.stop // 8 * 8))


def numbers(name: str, at: Any) -> int:
    """Return the buffer with this name on the operands' rank; it is the same for all lowerings."""
    return lowered_of(QWEN3, 3).numbers(name)[0] + int(at.rank)


def other_residual(at: Any) -> Any:
    both = numbers("x0", at), numbers("x1", at)
    return replace(at.normed, x=both[at.normed.x == both[0]])


def other_theta(spoilt: Spoilt) -> Spoilt:
    case, lowered = spoilt
    return replace(case, rotary=lambda places, *rest: case.rotary(places * 2, *rest)), lowered


def counting_empty(one: Any) -> CountsEmpty:
    return CountsEmpty(one.at, one.sequences, one.kv_head, one.heads, one.span)
