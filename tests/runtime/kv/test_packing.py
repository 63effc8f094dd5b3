"""Tests of converting padded batches to flat tokens and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpcompile.errors import UsageError
from tpcompile.runtime.kv.packing import pack


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.booleans())
def test_real_tokens_come_back_where_they_were(lengths: list[int], left: bool) -> None:
    longest = max(lengths) + 1
    ids = torch.arange(len(lengths) * longest).reshape(len(lengths), longest)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, slice(longest - length, None) if left else slice(length)] = 1
    packed = pack(ids, mask)
    assert packed.input_ids.tolist() == ids[mask.bool()].tolist()
    assert packed.starts.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert packed.positions.tolist() == [p for length in lengths for p in range(length)]
    logits = packed.input_ids[packed.logit_rows].float().unsqueeze(-1)
    assert packed.unpack(logits).squeeze(-1).tolist() == (ids * mask).float().tolist()


@pytest.mark.parametrize("columns", [[3], [2, 3], [0, 3]])
def test_only_the_logits_asked_for(columns: list[int]) -> None:
    ids = torch.arange(8).reshape(2, 4)
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    packed = pack(ids, mask, columns=columns)
    tokens = packed.unpack(packed.input_ids[packed.logit_rows].float().unsqueeze(-1)).squeeze(-1)
    assert tokens.tolist() == (ids * mask)[:, columns].float().tolist()


@pytest.mark.parametrize("with_positions", [False, True])
@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("columns", [None, [1], [2, 0]])
def test_a_column_of_padding_changes_no_input(
    columns: list[int] | None, past: int, with_positions: bool
) -> None:
    """Batches without padding are packed by fewer operations, to the same numbers."""
    ids, positions = torch.arange(6).reshape(2, 3), torch.tensor([[7, 8, 9]])
    cached = torch.ones(2, past, dtype=torch.bool)
    padded = torch.nn.functional.pad(ids, (0, 1))
    mask = torch.nn.functional.pad(torch.ones(2, past + 3), (0, 1))
    bare = pack(ids, None, positions if with_positions else None, columns, cached)
    more = torch.nn.functional.pad(positions, (0, 1)) if with_positions else None
    packed = pack(padded, mask, more, [0, 1, 2] if columns is None else columns, cached)
    for name, value in bare.inputs().items():
        assert value.dtype == torch.long
        assert value.tolist() == packed.inputs()[name].tolist()
    rows = torch.randn(len(bare.logit_rows), 5)
    assert torch.equal(bare.unpack(rows), packed.unpack(rows))


def test_positions_that_are_given_are_taken() -> None:
    ids = torch.zeros(2, 3, dtype=torch.long)
    packed = pack(ids, position_ids=torch.tensor([[4, 5, 6]]))
    assert packed.positions.tolist() == [4, 5, 6, 4, 5, 6]


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        (torch.zeros(3, dtype=torch.long), None, "input_ids"),
        (torch.zeros(2, 0, dtype=torch.long), None, "input_ids"),
        (torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 4), "attention_mask"),
        (torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 1, 3, 3), "attention_mask"),
        (torch.zeros(2, 3, dtype=torch.long), torch.tensor([[1, 1, 1], [0, 0, 0]]), "padding"),
    ],
)
def test_what_cannot_be_packed(ids: torch.Tensor, mask: torch.Tensor | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        pack(ids, mask)


def test_results_are_not_copied_if_the_caller_may_have_inference_tensors() -> None:
    """Outside inference mode, callers such as assisted sampling write to the logits."""
    packed = pack(torch.ones(2, 1, dtype=torch.long))
    with torch.inference_mode():
        rows = torch.ones(2, 5)
        assert packed.unpack(rows).data_ptr() == rows.data_ptr()
    assert not packed.unpack(rows).is_inference()
