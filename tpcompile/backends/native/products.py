"""Products of many tokens in bf16 with weights, by kernels of the native library."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from tpcompile.backends.native.many import (
    ADDRESS,
    NUMBER,
    PATHS,
    Heads,
    Operation,
    chosen_path,
    fields_of,
    run,
    structure,
    takes,
)
from tpcompile.ir.dtypes import DType
from tpcompile.ir.format import HIGH, SCALE, SUPER_SCALE, Format
from tpcompile.ir.layout import Interval
from tpcompile.ir.ops.few_bits import RoundingWeight, decoded
from tpcompile.vm.program.abi import PARTS

_COLUMNS = 32
"""The width of tokens is a multiple of this."""
_TOKENS = 128
"""The tokens of an item of a product: whole panels, few enough to keep all threads busy."""
_MANY_TOKENS = 512
"""The same for weights of few bits, whose rows each item decodes."""
_ITEMS = 2
"""The minimum number of items of a product per thread, if its rows suffice."""
_LANES = 16
"""The columns that kernels decode at a time."""
PACKED = 64
"""The tokens that an item packs: `kItem` of prompts_products.h."""
_WORDS = 64
"""The columns of rounded tokens that are packed together."""


def takes_product(
    x: torch.Tensor, weight: torch.Tensor | FewBits, bias: torch.Tensor | None
) -> bool:
    """Return whether the kernels take this linear."""
    takes_all = takes(x) and (bias is None or (takes(bias) and bias.is_contiguous()))
    if not takes_all or x.dim() != 2 or x.shape[1] % _COLUMNS:
        return False
    if isinstance(weight, FewBits):
        stored = weight.format
        if stored.columns % _LANES:
            return False
        if stored.rounds and stored.columns % stored.block:
            return False
        return all(part.is_contiguous() for part in weight.parts)
    return takes(weight) and weight.is_contiguous()


def is_faster(weight: torch.Tensor | FewBits) -> bool:
    """Return whether the kernels multiply faster than torch, which has no kernels for few bits."""
    return isinstance(weight, FewBits) or PATHS[chosen_path()].faster


_OF_ROWS = ("format", "row_bytes", "high_bytes", "groups", "supers", "first")
"""The fields of a weight in few bits: its format, and the layout of its rows."""
LinearOf = structure(
    ("x", Heads), *fields_of(ADDRESS, "weight", *PARTS),
    *fields_of(NUMBER, *_OF_ROWS),
    *fields_of(ADDRESS, "bias", "out", "packed", "factors", "sums"),
    *fields_of(NUMBER, "tokens", "columns", "rows", "part_rows", "part_tokens"),
    *fields_of(NUMBER, "swiglu", "threads"),
)  # fmt: skip


class FewBits(NamedTuple):
    """A weight of several components, of which kernels decode some rows at a time."""

    format: Format
    parts: Sequence[torch.Tensor]
    columns: Interval
    """Its columns, among those of the whole weight."""

    @property
    def by_suffix(self) -> Mapping[str, torch.Tensor]:
        """The components, by suffix."""
        names = (part.suffix for part in self.format.components)
        return dict(zip(names, self.parts, strict=True))

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of `_OF_ROWS`. Parts are rows without gaps."""
        widths = {suffix: part.shape[1] for suffix, part in self.by_suffix.items()}
        values = self.format.values
        return (
            int(self.format),
            widths[values.suffix] * values.dtype.itemsize,
            widths.get(HIGH, 0) * DType.I32.itemsize,
            widths[SCALE],
            widths.get(SUPER_SCALE, 0),
            self.columns[0],
        )

    def decoded(self, dtype: torch.dtype) -> torch.Tensor | RoundingWeight:
        """Return the whole weight as torch multiplies it."""
        return decoded(str(self.format), self.parts, self.columns, dtype)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor | FewBits,
    bias: torch.Tensor | None,
    swiglu: bool = False,
) -> torch.Tensor:
    """Compute the product of `x[tokens, columns]` and `weight[rows, columns]`, or its SwiGLU.

    The values of a weight of few bits are rounded to bf16, unless its format rounds the tokens.
    """
    product = Product.of(x, weight, -(-len(x) // PACKED) * PACKED, swiglu)
    arguments = product.arguments(bias)
    run(product.pack, arguments, -(-len(x) // PACKED), PACKED * x.shape[1])
    run(product.multiply, arguments, product.items(len(x)), product.item_values)
    return product.memory["out"]


@dataclass(frozen=True)
class Product:
    """A product of `x[tokens, columns]` and `weight[rows, columns]`, and its memory."""

    x: torch.Tensor
    weight: torch.Tensor | FewBits
    memory: Mapping[str, torch.Tensor]
    """The memory per token of `Linear` of prompts.h, by name: results, and packed tokens."""
    swiglu: bool
    """Whether the result is the SwiGLU of both halves of the product."""

    @classmethod
    def of(
        cls, x: torch.Tensor, weight: torch.Tensor | FewBits, packed: int, swiglu: bool = False
    ) -> Product:
        """Allocate memory with room for this number of packed tokens."""
        rows = len(weight.parts[0] if isinstance(weight, FewBits) else weight) // (1 + swiglu)
        names = ("packed", "factors", "sums")
        memory = dict(zip(names, _packed(packed, x.shape[1], weight), strict=False))
        return cls(x, weight, {"x": x, "out": x.new_empty(len(x), rows), **memory}, swiglu)

    @property
    def rounds(self) -> bool:
        """Whether tokens are rounded to int8."""
        return "sums" in self.memory

    @property
    def part_tokens(self) -> int:
        """The tokens of an item."""
        return _MANY_TOKENS if isinstance(self.weight, FewBits) else _TOKENS

    @cached_property
    def part_rows(self) -> int:
        """The rows of an item: as many as leave some items to each thread."""
        path = PATHS[chosen_path()]
        parts = -(-len(self.x) // self.part_tokens)
        share = self.memory["out"].shape[1] * parts // (_ITEMS * torch.get_num_threads())
        most = path.rows // (1 + self.swiglu)
        return min(most, max(1, share // path.together) * path.together)

    def items(self, tokens: Any) -> Any:
        """Return the number of items of these tokens."""
        rows = self.memory["out"].shape[1]
        return -(-rows // self.part_rows) * -(-tokens // self.part_tokens)

    @property
    def item_values(self) -> int:
        """The products of an item."""
        return self.part_rows * self.part_tokens * self.x.shape[1]

    @property
    def pack(self) -> Operation:
        return Operation.PACK_ROUNDED if self.rounds else Operation.PACK

    @property
    def multiply(self) -> Operation:
        return Operation.LINEAR_ROUNDED if self.rounds else Operation.LINEAR

    def arguments(self, bias: torch.Tensor | None = None) -> ctypes.Structure:
        """Return the arguments of both operations for all tokens."""
        parts = parts_of(self.weight)
        address = {name: part.data_ptr() for name, part in {**parts, **self.memory}.items()}
        optional = [address.get(name) for name in PARTS]
        (tokens, columns), rows = self.x.shape, self.memory["out"].shape[1]
        return LinearOf(
            *(Heads.of(self.x), address["weight"], *optional),
            *(self.weight.numbers if isinstance(self.weight, FewBits) else (0,) * len(_OF_ROWS)),
            *(None if bias is None else bias.data_ptr(), address["out"], address["packed"]),
            *(address.get("factors"), address.get("sums")),
            *(tokens, columns, rows, self.part_rows, self.part_tokens),
            *(self.swiglu, torch.get_num_threads()),
        )


def parts_of(weight: torch.Tensor | FewBits) -> dict[str, torch.Tensor]:
    """Return the components of a weight, by their names in `Linear` of prompts.h."""
    if isinstance(weight, torch.Tensor):
        return {"weight": weight}
    parts = weight.by_suffix
    optional = {name: parts[suffix] for name, suffix in PARTS.items() if suffix in parts}
    return {"weight": parts[weight.format.values.suffix], **optional}


def _packed(tokens: int, columns: int, weight: torch.Tensor | FewBits) -> list[torch.Tensor]:
    """Return memory for packed tokens, and for the factors and sums of rounded ones."""
    if not isinstance(weight, FewBits) or not weight.format.rounds:
        return [torch.empty(tokens, columns, dtype=PATHS[chosen_path()].packed)]
    first, last = weight.columns
    blocks = -(-last // weight.format.block) - first // weight.format.block
    return [
        torch.empty(tokens, -(-columns // _WORDS) * _WORDS, dtype=torch.int8),
        torch.empty(tokens, blocks),
        torch.empty(tokens, blocks, dtype=torch.int32),
    ]
