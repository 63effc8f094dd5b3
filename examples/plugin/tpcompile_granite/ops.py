"""Two ops: division, which Granite's logits need, and embedding with a scale."""

import torch

from tpcompile.ir.ops.elementwise import product_rule
from tpcompile.ir.ops.embedding import (
    vocab_embedding,
    vocab_embedding_localize,
    vocab_embedding_rule,
)
from tpcompile.ir.ops.spec import declare, define, streaming_cost
from tpcompile.ir.types import ValueType

DIV = declare(torch.ops.aten.div.Tensor, product_rule, streaming_cost)


def scaled_embedding(
    weight: torch.Tensor, ids: torch.Tensor, scale: float, first_row: int = 0
) -> torch.Tensor:
    """Look up ids in a table or a part of it, and multiply by a number."""
    return vocab_embedding(weight, ids, first_row) * scale


def scaled_embedding_rule(
    weight: ValueType, ids: ValueType, scale: float, first_row: int = 0
) -> ValueType:
    """Return the type of the result: a term of a sum if ranks hold parts of the table."""
    return vocab_embedding_rule(weight, ids, first_row)


SCALED_EMBEDDING = define(
    scaled_embedding,
    rule=scaled_embedding_rule,
    cost=streaming_cost,
    localize=vocab_embedding_localize,
    written=lambda weight, ids, scale, first_row: (
        f"tpc.vocab_embedding({weight}, {ids}, {first_row}) * {scale}"
    ),
)
