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
    with tpcompile.compile(eager, max_seq_len=160, weights=weights) as compiled:
        yield compiled


def piece(number: int, first: int, count: int) -> Piece:
    return Piece(Sequence((number, number), [1] * (first + count)), first, count)


def test_groups_keep_the_order_of_a_sequence() -> None:
    first, second = (Sequence((n, n), [1] * 64) for n in range(2))
    chunks = [Piece(first, 0, 32), Piece(first, 32, 5), Piece(first, 37, 27), Piece(second, 0, 32)]
    runs = list(groups(chunks, lambda chunk: chunk.count < 16))
    assert runs == [[chunks[0], chunks[3]], [chunks[1]], [chunks[2]]]
    assert list(groups([], lambda chunk: False)) == []
    assert list(groups(chunks, lambda chunk: True)) == [[chunk] for chunk in chunks]


def test_a_run_has_few_enough_tokens() -> None:
    """The first tokens of some requests do not wait for the prompts of all others in a step."""
    chunks = [piece(number, 0, 128) for number in range(9)]
    runs = list(groups(chunks, lambda chunk: False))
    assert runs == [chunks[:4], chunks[4:8], chunks[8:]]
    large = piece(0, 0, 600)
    assert list(groups([large], lambda chunk: False)) == [[large]]


def test_chunks_of_a_sequence_with_states_are_apart() -> None:
    """Each of them joins the first run after the one before it that has room."""
    first, second, third = (Sequence((n, n), [1] * 512) for n in range(3))
    chunks = [
        Piece(sequence, start, 128) for sequence in (first, second) for start in (0, 128, 256)
    ]
    chunks += [Piece(third, 0, 128), Piece(third, 128, 5), Piece(third, 133, 128)]
    runs = list(groups(chunks, lambda chunk: chunk.count < 16, apart=True))
    assert runs == [
        [chunks[0], chunks[3], chunks[6]],
        [chunks[1], chunks[4]],
        [chunks[2], chunks[5]],
        [chunks[7]],
        [chunks[8]],
    ]
    many = [piece(number, 0, 128) for number in range(5)]
    follows = Piece(many[0].sequence, 128, 128)
    assert list(groups([*many, follows], lambda chunk: False, apart=True)) == [
        many[:4],
        [many[4], follows],
    ]


def counted(model: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the tokens of each run of modules from now on."""
    sizes: list[int] = []
    run = model.run_step

    def counting(step: Any) -> torch.Tensor:
        if len(step.inputs["lengths"]) < len(step.inputs["input_ids"]):
            sizes.append(len(step.inputs["input_ids"]))
        result: torch.Tensor = run(step)
        return result

    monkeypatch.setattr(model, "run_step", counting)
    return sizes


def test_prompts_have_the_bits_of_prompts_alone(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = Random(1)
    batch = [(prompt(dice, n), greedy(3, logprobs=4)) for n in LENGTHS]
    with Engine(model, max_batch=8, chunk=32) as engine:
        alone = [engine.add(*request, salt=n).result()[0].chosen for n, request in enumerate(batch)]
        sizes = counted(model, engine, monkeypatch)
        handles = [engine.add(*request, salt=f"again {n}") for n, request in enumerate(batch)]
        together = [handle.result()[0].chosen for handle in handles]
    assert together == alone
    if engine._runs._least == 16:  # nearly all machines
        assert max(sizes) == sum(n for n in LENGTHS if n >= 16) - 13 - 1 - 1


def test_short_chunks_share_steps_of_a_program(model: Any) -> None:
    """The rest of a prompt is one too, whether the chunks before it are in the cache or not."""
    lengths = (5, 3, 32 + 5, 8, 2)
    dice = Random(2)
    batch = [(prompt(dice, n), greedy(3, logprobs=4)) for n in lengths]
    with Engine(model, max_batch=8, chunk=32) as engine:
        alone = [engine.add(*request, salt=n).result()[0].chosen for n, request in enumerate(batch)]
        for modules in (1, 0):  # the second time the whole chunk is in the cache
            before = model.steps
            handles = [engine.add(*request) for request in batch]
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
        batch = [(prompt(Random(3), n), greedy(3, logprobs=2)) for n in (8, 12, 31)]
        alone = [engine.add(*request, salt=n).result()[0].chosen for n, request in enumerate(batch)]
        assert [engine.add(*request).result()[0].chosen for request in batch] == alone


def replace_linear(monkeypatch: pytest.MonkeyPatch, linear: Any) -> None:
    for functions in (native_functions, torch_functions):
        monkeypatch.setattr(functions, "linear", linear)


def test_rows_that_depend_on_each_other_are_computed_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A product whose bits depend on the number of rows is noticed."""

    def dependent(x: torch.Tensor, weight: torch.Tensor, bias: None = None) -> torch.Tensor:
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
    def few(x: torch.Tensor, weight: torch.Tensor, bias: None = None) -> torch.Tensor:
        product = torch.nn.functional.linear(x, weight)
        return product if len(x) > 64 else product * (1 + 1e-6)

    replace_linear(monkeypatch, few)
    with tpcompile.compile(lively("tiny-qwen3"), max_seq_len=160) as model:
        assert rows.independent_from(model) == 65
