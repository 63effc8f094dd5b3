"""Chunks of prompts share a run, and this changes no bit of theirs."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch

import tpcompile
from tests.runtime.eager_pair import lively
from tests.serving.test_engine import greedy, prompt
from tpcompile.backends.native import functions as native_functions
from tpcompile.backends.torch_tp import functions as torch_functions
from tpcompile.serving import Engine, rows
from tpcompile.serving.plan import Piece, Sequence, groups

LENGTHS = (32, 45, 64, 97, 17, 3, 33)


@pytest.fixture(
    scope="module", params=[("float32", None), ("bfloat16", None), ("bfloat16", "int4:32")]
)
def model(request: pytest.FixtureRequest) -> Iterator[tpcompile.CompiledModel]:
    dtype, weights = request.param
    eager = lively("tiny-qwen3").to(getattr(torch, dtype))
    with tpcompile.compile(eager, max_seq_len=160, weights=weights) as made:
        yield made


def piece(number: int, first: int, count: int) -> Piece:
    return Piece(Sequence((number, number), [1] * (first + count)), first, count)


def test_groups_keep_the_order_of_a_sequence() -> None:
    one, two = (Sequence((n, n), [1] * 64) for n in range(2))
    chunks = [Piece(one, 0, 32), Piece(one, 32, 5), Piece(one, 37, 27), Piece(two, 0, 32)]
    found = list(groups(chunks, lambda own: own.count < 16))
    assert found == [[chunks[0], chunks[3]], [chunks[1]], [chunks[2]]]
    assert list(groups([], lambda own: False)) == []
    assert list(groups(chunks, lambda own: True)) == [[own] for own in chunks]


def test_a_run_has_few_enough_tokens() -> None:
    """The first tokens of some requests do not wait for the prompts of all others in a step."""
    chunks = [piece(number, 0, 128) for number in range(9)]
    found = list(groups(chunks, lambda own: False))
    assert found == [chunks[:4], chunks[4:8], chunks[8:]]
    large = piece(0, 0, 600)
    assert list(groups([large], lambda own: False)) == [[large]]


def test_chunks_of_a_sequence_with_states_are_apart() -> None:
    """Each of them joins the first run after the one before it that has room."""
    one, two, three = (Sequence((n, n), [1] * 512) for n in range(3))
    chunks = [Piece(own, first, 128) for own in (one, two) for first in (0, 128, 256)]
    chunks += [Piece(three, 0, 128), Piece(three, 128, 5), Piece(three, 133, 128)]
    found = list(groups(chunks, lambda own: own.count < 16, apart=True))
    assert found == [
        [chunks[0], chunks[3], chunks[6]],
        [chunks[1], chunks[4]],
        [chunks[2], chunks[5]],
        [chunks[7]],
        [chunks[8]],
    ]
    many = [piece(number, 0, 128) for number in range(5)]
    follows = Piece(many[0].sequence, 128, 128)
    assert list(groups([*many, follows], lambda own: False, apart=True)) == [
        many[:4],
        [many[4], follows],
    ]


def counted(model: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the tokens of each run of modules from now on."""
    found: list[int] = []
    run = model.run_step

    def counting(step: Any) -> torch.Tensor:
        if len(step.inputs["lengths"]) < len(step.inputs["input_ids"]):
            found.append(len(step.inputs["input_ids"]))
        result: torch.Tensor = run(step)
        return result

    monkeypatch.setattr(model, "run_step", counting)
    return found


def test_prompts_have_the_bits_of_prompts_alone(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = Random(1)
    asked = [(prompt(dice, n), greedy(3, logprobs=4)) for n in LENGTHS]
    with Engine(model, max_batch=8, chunk=32) as engine:
        alone = [engine.add(*one, salt=n).result()[0].chosen for n, one in enumerate(asked)]
        sizes = counted(model, engine, monkeypatch)
        handles = [engine.add(*one, salt=f"again {n}") for n, one in enumerate(asked)]
        together = [handle.result()[0].chosen for handle in handles]
    assert together == alone
    if engine._runs._least == 16:  # nearly all machines
        assert max(sizes) == sum(n for n in LENGTHS if n >= 16) - 13 - 1 - 1


def test_short_chunks_share_steps_of_a_program(model: Any) -> None:
    """The rest of a prompt is one too, whether the chunks before it are in the cache or not."""
    lengths = (5, 3, 32 + 5, 8, 2)
    dice = Random(2)
    asked = [(prompt(dice, n), greedy(3, logprobs=4)) for n in lengths]
    with Engine(model, max_batch=8, chunk=32) as engine:
        alone = [engine.add(*one, salt=n).result()[0].chosen for n, one in enumerate(asked)]
        for modules in (1, 0):  # the second time the whole chunk is in the cache
            before = model.steps
            handles = [engine.add(*one) for one in asked]
            assert [handle.result()[0].chosen for handle in handles] == alone
            # chunks of 5 + 3 + 5 and of 8 + 2 tokens, and two more tokens of each request
            assert model.steps.program - before.program == 2 + 2
            assert model.steps.modules - before.modules == modules


def test_a_whole_chunk_is_longer_than_short_ones() -> None:
    """Else a chunk that others share would be computed as the rest of one prompt requires."""
    eager = lively("tiny-qwen3")
    with (
        tpcompile.compile(eager, max_seq_len=64, pipeline="standard{block=4}") as model,
        Engine(model, max_batch=2, chunk=4) as engine,
    ):
        assert model.most_program_tokens == 8
        assert engine.scheduler.limits.chunk == 12
        asked = [(prompt(Random(3), n), greedy(3, logprobs=2)) for n in (8, 12, 31)]
        alone = [engine.add(*each, salt=n).result()[0].chosen for n, each in enumerate(asked)]
        assert [engine.add(*each).result()[0].chosen for each in asked] == alone


def replace_linear(monkeypatch: pytest.MonkeyPatch, linear: Any) -> None:
    for functions in (native_functions, torch_functions):
        monkeypatch.setattr(functions, "linear", linear)


def test_rows_that_depend_on_each_other_are_computed_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A product whose bits depend on the number of rows is noticed."""

    def dependent(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight) * (1 + len(x) * 1e-6)

    replace_linear(monkeypatch, dependent)
    with tpcompile.compile(lively("tiny-qwen3"), max_seq_len=160) as model:
        assert rows.independent_from(model) is None
        with Engine(model, max_batch=4, chunk=32) as engine:
            sizes = counted(model, engine, monkeypatch)
            for handle in [engine.add(prompt(Random(n), 64), greedy(1)) for n in range(3)]:
                handle.result()
        assert sizes == [32] * 6


def test_kernels_that_differ_for_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def few(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        found = torch.nn.functional.linear(x, weight)
        return found if len(x) > 64 else found * (1 + 1e-6)

    replace_linear(monkeypatch, few)
    with tpcompile.compile(lively("tiny-qwen3"), max_seq_len=160) as model:
        assert rows.independent_from(model) == 65
