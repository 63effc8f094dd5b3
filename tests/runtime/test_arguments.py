"""Invalid arguments are refused without side effects; valid ones are those that eager accepts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import tpcompile
from tests.models import TOLERANCE, relative_error
from tests.runtime.eager_pair import PAD, Both, tiny_both
from tpcompile.errors import UsageError

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
MASK = torch.ones_like(IDS)
pytestmark = pytest.mark.usefixtures("forked_launchers")

PLACES = torch.arange(4)[None]


@pytest.fixture(scope="module", params=["simulated", "spawned"])
def pair(request: pytest.FixtureRequest) -> Iterator[Both]:
    simulated = tiny_both()
    if request.param == "simulated":
        yield simulated
        return
    with tpcompile.compile(simulated.eager, tp=2) as compiled:
        yield Both(simulated.eager, compiled)


def _nested(x: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([x[0], x[1, :2]], layout=torch.jagged)


BAD: dict[str, dict[str, Any]] = {
    **{
        f"ids of {dtype}": {"input_ids": IDS.to(dtype)}
        for dtype in (
            torch.bool,
            torch.uint8,
            torch.int8,
            torch.int16,
            torch.uint16,
            torch.uint32,
            torch.uint64,
            torch.float32,
            torch.bfloat16,
            torch.complex64,
        )
    },
    "no ids": {},
    "ids in a list": {"input_ids": IDS.tolist()},
    "ids of one dimension": {"input_ids": IDS[0]},
    "ids of three dimensions": {"input_ids": IDS[None]},
    "ids of no dimension": {"input_ids": torch.tensor(5)},
    "ids without a batch": {"input_ids": IDS[:0]},
    "ids without a token": {"input_ids": IDS[:, :0]},
    "an id below the vocabulary": {"input_ids": IDS - 20},
    "an id above the vocabulary": {"input_ids": IDS + 2000},
    "meta ids": {"input_ids": IDS.to("meta")},
    "sparse ids": {"input_ids": IDS.to_sparse()},
    "nested ids": {"input_ids": _nested(IDS)},
    "embeddings": {"inputs_embeds": torch.zeros(2, 4, 64)},
    "ids and embeddings": {"input_ids": IDS, "inputs_embeds": torch.zeros(2, 4, 64)},
    "a mask in a list": {"attention_mask": MASK.tolist()},
    "a mask of one dimension": {"attention_mask": MASK[0]},
    "a mask of three dimensions": {"attention_mask": MASK[None]},
    "a mask of four dimensions": {"attention_mask": torch.ones(2, 1, 4, 4)},
    "a mask of another batch": {"attention_mask": MASK[:1]},
    "a longer mask": {"attention_mask": torch.ones(2, 5)},
    "a complex mask": {"attention_mask": MASK.to(torch.complex64)},
    "a meta mask": {"attention_mask": MASK.to("meta")},
    "a sparse mask": {"attention_mask": MASK.to_sparse()},
    "a nested mask": {"attention_mask": _nested(MASK)},
    "a mask of zeros": {"attention_mask": torch.zeros(2, 4)},
    "a mask with a hole": {"attention_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])},
    "positions in a list": {"position_ids": [[0, 1, 2, 3]]},
    "positions of one dimension": {"position_ids": PLACES[0]},
    "positions of three dimensions": {"position_ids": PLACES[None]},
    "positions of another batch": {"position_ids": PLACES.repeat(3, 1)},
    "too few positions": {"position_ids": PLACES[:, :3]},
    "positions of bool": {"position_ids": PLACES.bool()},
    "positions of floats": {"position_ids": PLACES + 0.5},
    "complex positions": {"position_ids": PLACES.to(torch.complex64)},
    "meta positions": {"position_ids": PLACES.to("meta")},
    "sparse positions": {"position_ids": PLACES.to_sparse()},
    "another cache": {"past_key_values": DynamicCache()},
    "a cache of tuples": {"past_key_values": ((None, None),)},
    "a cache by name": {"past_key_values": "dynamic"},
    "a number that is not an int": {"logits_to_keep": 2.0},
    "logits by name": {"logits_to_keep": "last"},
    "a column above the range": {"logits_to_keep": torch.tensor([4])},
    "a column below the range": {"logits_to_keep": torch.tensor([-5])},
    "columns in a list out of range": {"logits_to_keep": [0, 4]},
    "columns of floats": {"logits_to_keep": torch.tensor([1.0])},
    "columns of int16": {"logits_to_keep": torch.tensor([1], dtype=torch.int16)},
    "a short mask of columns": {"logits_to_keep": torch.tensor([True])},
    "other columns for each row": {"logits_to_keep": torch.tensor([[0], [1]])},
    "meta columns": {"logits_to_keep": torch.tensor([1], device="meta")},
    "a string for use_cache": {"use_cache": "no"},
    "a tensor for use_cache": {"use_cache": torch.tensor([True, False])},
    "a string for return_dict": {"return_dict": "yes"},
    "labels": {"labels": IDS},
}


@pytest.fixture(scope="module")
def answer(pair: Both) -> torch.Tensor:
    """Return the model's answer before any invalid call."""
    logits: torch.Tensor = pair.compiled(IDS).logits
    return logits


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_argument_changes_nothing(pair: Both, answer: torch.Tensor, bad: str) -> None:
    arguments = BAD[bad]
    if not {"input_ids", "inputs_embeds"} & set(arguments) and bad != "no ids":
        arguments = {"input_ids": IDS, **arguments}
    used = pair.compiled._pool.used
    with pytest.raises((tpcompile.UsageError, tpcompile.UnsupportedError)):
        pair.compiled(**arguments)
    assert pair.compiled._pool.used == used
    assert torch.equal(pair.compiled(IDS).logits, answer)


def test_a_bad_argument_leaves_the_cache_as_it_was(pair: Both, answer: torch.Tensor) -> None:
    cache = pair.compiled(IDS[:, :2]).past_key_values
    for arguments in (
        {"input_ids": IDS[:1, 2:]},  # another batch
        {"input_ids": IDS[:, 2:], "attention_mask": MASK[:, 2:]},  # misses the cached tokens
        {"input_ids": IDS[:, 2:], "attention_mask": torch.cat([MASK[:, :2] * 0, MASK[:, 2:]], 1)},
        {"input_ids": IDS[:, 2:].to(torch.uint8)},
        {"input_ids": IDS[:, 2:], "logits_to_keep": [3]},
        {"input_ids": IDS[:, 2:], "use_cache": "no"},
    ):
        with pytest.raises((tpcompile.UsageError, tpcompile.UnsupportedError)):
            pair.compiled(**arguments, past_key_values=cache)
        assert cache.lengths == (2, 2)
    logits = pair.compiled(IDS[:, 2:], past_key_values=cache).logits
    assert relative_error(logits, answer[:, 2:]) < TOLERANCE


GOOD: dict[str, dict[str, Any]] = {
    "ids of 32 bits": {"input_ids": IDS.int()},
    "ids with strides": {"input_ids": IDS.repeat(1, 2)[:, ::2]},
    "one row for all": {"input_ids": IDS[:1].expand(2, 4)},
    "transposed ids": {"input_ids": IDS.t().contiguous().t()},
    "a mask of bool": {"attention_mask": MASK.bool()},
    "a mask of floats": {"attention_mask": MASK.float()},
    "a mask of bytes": {"attention_mask": MASK.to(torch.uint8)},
    "a mask of other numbers": {"attention_mask": MASK * -3},
    "a mask with gradients": {"attention_mask": MASK.float().requires_grad_()},
    "positions per row": {"position_ids": PLACES.repeat(2, 1)},
    "positions of 16 bits": {"position_ids": PLACES.to(torch.int16)},
    "positions of bytes": {"position_ids": PLACES.to(torch.uint8)},
    "negative positions": {"position_ids": PLACES - 7},
    "positions far away": {"position_ids": PLACES + 9000},
    "more logits than columns": {"logits_to_keep": 9},
    "a negative number": {"logits_to_keep": -1},
    "a negative number beyond": {"logits_to_keep": -9},
    "true": {"logits_to_keep": True},
    "columns in a list": {"logits_to_keep": [2, 0]},
    "columns in a tuple": {"logits_to_keep": (1, 3)},
    "a slice of columns": {"logits_to_keep": slice(1, 3)},
    "a column": {"logits_to_keep": torch.tensor(2)},
    "columns of 32 bits": {"logits_to_keep": torch.tensor([3, 1], dtype=torch.int32)},
    "a mask of columns": {"logits_to_keep": torch.tensor([True, False, True, False])},
    "no column": {"logits_to_keep": torch.tensor([], dtype=torch.long)},
    "a cache": {"use_cache": 1},
    "no cache": {"use_cache": 0},
    "a tuple": {"return_dict": 0},
}


@pytest.mark.parametrize("good", GOOD)
def test_what_eager_takes(pair: Both, good: str) -> None:
    arguments = {"input_ids": IDS, **GOOD[good]}
    with torch.inference_mode():
        expected, actual = (model(**arguments) for model in pair.each())
    assert len(actual) == len(expected)
    assert actual[0].shape == expected[0].shape
    if actual[0].numel():
        assert relative_error(actual[0], expected[0]) < TOLERANCE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs": IDS.to(torch.uint8)}, "torch.uint8"),
        ({"input_ids": IDS.float()}, "torch.float32"),
        ({"inputs_embeds": torch.zeros(2, 4, 64)}, "inputs_embeds"),
        ({"inputs": IDS, "inputs_embeds": torch.zeros(2, 4, 64)}, "inputs_embeds"),
        ({"inputs": IDS, "attention_mask": MASK[0]}, "attention_mask"),
        ({"inputs": IDS, "attention_mask": torch.ones(2, 1, 4, 4)}, "query-key pairs"),
        ({"inputs": IDS, "assistant_early_exit": 1}, "assistant_early_exit=1"),
    ],
)
def test_what_generate_is_not_given(pair: Both, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((tpcompile.UsageError, tpcompile.UnsupportedError), match=message):
        pair.compiled.generate(**arguments, max_new_tokens=2, pad_token_id=PAD)
    pair.same(IDS, max_new_tokens=2, do_sample=False)


CACHELESS = "canonicalize,raise-norm,raise-rope,raise-swiglu,raise-attention"


@pytest.mark.parametrize("pipeline", [None, CACHELESS])
def test_a_sequence_that_is_too_long(pipeline: str | None) -> None:
    """With a KV cache and without one, also as one of several rows."""
    eager = tiny_both().eager
    options = {"backend": "torch", "simulate": True, "pipeline": pipeline}
    with tpcompile.compile(eager, 1, max_seq_len=8, **options) as model:
        mask = torch.tensor([[0] + [1] * 8, [1] * 9])
        assert model(torch.ones(1, 8, dtype=torch.long)).logits.shape[1] == 8
        for ids, padding in ((torch.ones(1, 9), None), (torch.ones(2, 9), mask)):
            with pytest.raises(UsageError, match=r"at most max_seq_len=8 tokens.*Found 9 tokens"):
                model(ids.long(), attention_mask=padding, use_cache=False)
