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
    return lambda instruction: instruction.at.site == which


def eps(number: float) -> Callable[[Any], Any]:
    return lambda operands: replace(operands.normed, eps=number)


def normed_with(name: str, model: str = QWEN3, tp: int = 3) -> Callable[[Any], Any]:
    """Replace the norm's weight with this one."""
    return lambda operands: replace(
        operands.normed, weight=lowered_of(model, tp).numbers(name)[0] + operands.rank
    )


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


def other_positions(offset: int) -> Callable[[Tensors, Any], None]:
    def change(memory: Tensors, operands: Any) -> None:
        memory[operands.positions] = memory[operands.positions] + offset

    return change


def one_slot_off(operands: QkvOperands, memory: Tensors) -> Any:
    for row, length in enumerate(memory[operands.lengths].tolist()):
        held, place = divmod(length, operands.block)
        yield row, int(memory[operands.tables][row, held]) * operands.block + place


def sides_swapped(memory: Tensors, operands: Any) -> None:
    memory[operands.out] = memory[operands.out].flip(1)


def swapped_back(memory: Any, other: Tensors, operands: Any) -> None:
    memory[operands.out].copy_(other[operands.out].flip(1))


def layers_swapped(memory: Tensors, operands: Any) -> None:
    memory[operands.out] = memory[operands.out].flip(0)


def layers_back(memory: Any, other: Tensors, operands: Any) -> None:
    memory[operands.out].copy_(other[operands.out].flip(0))


def spanned(change: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `attend_span` to change its partials."""
    right = attention.attend_span

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Any:
        values, lse = right(q, k, v, scale)
        return change(values, lse, q, k, scale)

    return attend


def without_maximum(values: Any, lse: Any, q: Any, k: Any, scale: float) -> Any:
    return values, lse - (q @ k.transpose(0, 1) * scale).amax(-1)


def in_base_two(values: Any, lse: Any, *args: Any) -> Any:
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


def equal_weights(partial: Any, other: Any, **functions: Any) -> Any:
    return (partial[0] + other[0]) / 2, torch.maximum(partial[1], other[1])


def overwritten(partial: Any, other: Any, **functions: Any) -> Any:
    """Keep only the last span."""
    return other


def plus_residual(share: float) -> Callable[[Any], Any]:
    """Add a share of the residual to each rank's partial sum."""

    def change(instruction: Any) -> Any:
        summed = next(
            other
            for other in lowered_of(QWEN3, 3).instructions
            if isinstance(other, AllReduce)
            and (other.layer, other.rank, other.at.site)
            == (instruction.layer, instruction.rank, instruction.at.site)
        )
        return WithResidual(instruction, summed.at.residual, share)

    return change


@dataclass(frozen=True)
class WithResidual(Mistaken):
    """Instruction whose partial sums include a share of the residual."""

    residual: int = NONE
    share: float = 1.0

    def run(self, memory: Any, probe: Any = None) -> None:
        self.one.run(memory, probe)
        instruction: Any = self.one
        out = memory[instruction.at.out]
        out[instruction.terms.slice, instruction.rows.slice] += (
            self.share * memory[self.residual][:, instruction.rows.slice]
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


def one_row_off(memory: Tensors, operands: Any) -> None:
    memory[operands.weight] = memory[operands.weight].roll(1, 0)


def last_of_equals(memory: Tensors, operands: Any) -> None:
    """Reverse all slots, so that the last of several maxima wins."""
    for rank in range(operands.ranks):
        for first in (operands.best, operands.ids):
            memory[first + rank] = memory[first + rank].flip(1)
    for first in (operands.best, operands.ids):
        held = memory[first : first + operands.ranks]
        memory[first : first + operands.ranks] = held[::-1]


def fewer_columns(instruction: Any) -> Any:
    """Round the width down to a multiple of eight, and drop the rest."""
    return replace(
        instruction, columns=Range(instruction.columns.start, instruction.columns.stop // 8 * 8)
    )


def numbers(name: str, operands: Any) -> int:
    """Return the buffer with this name on the operands' rank; it is the same for all lowerings."""
    return lowered_of(QWEN3, 3).numbers(name)[0] + int(operands.rank)


def other_residual(operands: Any) -> Any:
    residuals = numbers("x0", operands), numbers("x1", operands)
    return replace(operands.normed, x=residuals[operands.normed.x == residuals[0]])


def other_theta(spoilt: Spoilt) -> Spoilt:
    case, lowered = spoilt
    return replace(case, rotary=lambda places, *args: case.rotary(places * 2, *args)), lowered


def counting_empty(instruction: Any) -> CountsEmpty:
    return CountsEmpty(
        instruction.at,
        instruction.sequences,
        instruction.kv_head,
        instruction.heads,
        instruction.span,
    )
