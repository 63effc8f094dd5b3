"""Programs compute sequences with few new tokens, with the same bits in any company."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tpcompile
from tests.backends.reference.step_models import lively_experts
from tests.runtime.eager_pair import lively
from tests.serving.hybrids import remembering
from tpcompile.backends.native.executor import Native
from tpcompile.errors import UsageError
from tpcompile.runtime.ranks import parts as division
from tpcompile.runtime.ranks.parts import groups_of_rows, in_rows, joined, parts_of
from tpcompile.runtime.ranks.program import ProgramRanks
from tpcompile.runtime.ranks.step import MOST_ROWS, Routing, Step

pytestmark = pytest.mark.usefixtures("captured_once")
MOST = Native.most_tokens


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let programs compute short prompts in calls of models, as in the steps of an engine."""
    whole = ProgramRanks.run
    run = lambda self, step: whole(self, replace(step, few=True))  # noqa: E731
    monkeypatch.setattr(ProgramRanks, "run", run)


def step_with(counts: list[int], rows: list[int] | None = None, **options: Any) -> Step:
    """Return a step of sequences with so many new tokens; by default, all logits are requested."""
    tokens = sum(counts)
    inputs = {
        "input_ids": torch.arange(tokens),
        "positions": torch.arange(tokens) + 100,
        "slots": torch.arange(tokens) + 200,
        "starts": torch.tensor([0, *accumulate(counts)]),
        "logit_rows": torch.tensor([*range(tokens)] if rows is None else rows, dtype=torch.long),
        "tables": torch.arange(len(counts))[:, None],
        "lengths": torch.tensor(counts) + 50,
        "read": torch.arange(len(counts)),
        "write": torch.arange(len(counts)) + 1000,
    }
    return Step(inputs, "logits", 9, [(1, 2)], **options)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([1, 1], [(True, [1, 1])]),
        ([1] * 40, [(True, [1] * 40)]),
        ([MOST], [(True, [MOST])]),
        ([MOST + 1], [(False, [MOST + 1])]),
        ([1, 30], [(False, [30]), (True, [1])]),
        ([30, 0, 2, 40, 5], [(False, [30, 40]), (True, [2, 5])]),
        ([8, 8, 8], [(True, [8, 8]), (True, [8])]),
        ([0, 1], [(True, [1])]),
    ],
)
def test_the_number_of_tokens_decides(
    counts: list[int], expected: list[tuple[bool, list[int]]]
) -> None:
    parts = parts_of(step_with(counts), MOST)
    assert [
        (part.by_program, part.step.inputs["starts"].diff().tolist()) for part in parts
    ] == expected
    assert [len(part.step.copies) for part in parts] == [1] + [0] * (len(parts) - 1)


def test_what_modules_run_as_a_whole() -> None:
    for step in (step_with([1], []), step_with([1, 9], routing=Routing())):
        assert [(part.by_program, part.step) for part in parts_of(step, MOST)] == [(False, step)]
    without = step_with([1])
    inputs = {name: value for name, value in without.inputs.items() if name != "tables"}
    assert not parts_of(Step(inputs, "logits"), MOST)[0].by_program


def test_guesses_are_rows() -> None:
    step = step_with([12, 3], rows=[14])
    step = replace(step, rows=True)
    assert [(part.by_program, part.step) for part in parts_of(step, 1)] == [(True, step)]


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.randoms(use_true_random=False))
def test_parts_make_up_the_step(counts: list[int], dice: Random) -> None:
    """Each token is in one part, with its place, its slot and its sequence; so is each result."""
    if not sum(counts):
        return
    rows = [dice.randrange(sum(counts)) for _ in range(dice.randrange(1, 12))]
    step = step_with(counts, rows)
    parts = parts_of(step, MOST)
    results = []
    tokens: list[int] = []
    for part in parts:
        inputs = part.step.inputs
        ids = inputs["input_ids"]
        tokens += ids.tolist()
        assert torch.equal(inputs["positions"], ids + 100)
        assert torch.equal(inputs["slots"], ids + 200)
        for number, first in zip(inputs["tables"][:, 0], inputs["starts"], strict=False):
            if first < len(ids) and counts[int(number)]:
                assert ids[first] == step.inputs["starts"][number]
        assert torch.equal(inputs["lengths"], step.inputs["lengths"][inputs["tables"][:, 0]])
        results.append(ids[inputs["logit_rows"]])
        if part.by_program and part.step.rows:
            assert len(ids) <= MOST_ROWS
    assert sorted(tokens) == [*range(sum(counts))]
    assert joined(parts, results).tolist() == rows


@settings(deadline=None)
@given(st.lists(st.integers(1, MOST_ROWS), max_size=20))
def test_groups_of_rows(rows: list[int]) -> None:
    groups = groups_of_rows(rows, lambda count: count)
    assert [count for group in groups for count in group] == rows
    assert all(sum(group) <= MOST_ROWS for group in groups)
    assert all(sum(a) + b[0] > MOST_ROWS for a, b in pairwise(groups))


def test_rows_of_a_sequence_write_its_state() -> None:
    (part,) = parts_of(step_with([3, 1, 2]), MOST)
    inputs = in_rows(part.step).inputs
    assert inputs["write"].tolist() == [1000, 1000, 1000, 1001, 1002, 1002]
    assert inputs["read"].tolist() == [0, 1000, 1000, 1, 2, 1002]
    assert inputs["lengths"].tolist() == [51, 52, 53, 51, 51, 52]
    assert inputs["tables"][:, 0].tolist() == [0, 0, 0, 1, 2, 2]


@pytest.fixture(
    scope="module",
    params=[
        (lambda: lively("tiny-qwen3"), {"tp": 3}),
        (lambda: lively("tiny-qwen2").bfloat16(), {"weights": "int4:32"}),
        (lambda: lively("tiny-qwen3").bfloat16(), {"tp": 2, "kv": "int8"}),
        (lambda: lively_experts().bfloat16(), {}),
        (lambda: remembering().bfloat16(), {"tp": 2}),
    ],
    ids=["fp32, 3 ranks", "int4", "KV in int8, 2 ranks", "experts", "linear attention, 2 ranks"],
)
def model(request: pytest.FixtureRequest) -> Iterator[tpcompile.CompiledModel]:
    make, options = request.param
    with tpcompile.compile(make(), max_seq_len=96, **options) as compiled:
        yield compiled


def prompt(length: int) -> list[int]:
    return [7 + (length * 5 + place * place * 3) % 90 for place in range(length)]


def answer(model: Any, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Return the logits after prompts that are padded to one length, and those of two steps."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(tokens)) + tokens for tokens in prompts])
    mask = torch.tensor([[0] * (longest - len(tokens)) + [1] * len(tokens) for tokens in prompts])
    cache = model.new_cache()
    logits = []
    for _ in range(3):
        out = model(ids, attention_mask=mask, past_key_values=cache, logits_to_keep=1)
        logits.append(out.logits[:, -1])
        ids = torch.full((len(prompts), 1), 9)
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
    return list(torch.stack(logits, 1))


@pytest.mark.usefixtures("few")
def test_each_token_of_a_short_prompt_has_the_bits_of_a_step(model: Any) -> None:
    """A state or a key of another row would change the logits of the steps after the prompt."""
    before = model.steps
    for length in (2, 5, MOST):
        (whole,) = answer(model, [prompt(length)])
        cache = model.new_cache()
        for token in [*prompt(length), 9, 9]:
            logits = model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1]
        assert torch.equal(whole[-1], logits)
    assert model.steps.modules == before.modules
    answer(model, [prompt(MOST + 1)])
    assert model.steps.modules == before.modules + 1


@pytest.mark.usefixtures("few")
def test_company_changes_no_bit(model: Any) -> None:
    prompts = [prompt(length) for length in (1, MOST, MOST + 1, 3, 20, 7, 2)]
    if model.dtype == torch.float32:  # products of torch depend on the number of rows
        prompts = [tokens for tokens in prompts if len(tokens) <= MOST]
    together = answer(model, prompts)
    for tokens, logits in zip(prompts, together, strict=True):
        assert torch.equal(answer(model, [tokens])[0], logits), len(tokens)


@pytest.mark.usefixtures("few")
def test_modules_have_other_bits(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is why the rule may not depend on company or on timing."""
    alone = answer(model, [prompt(MOST)])[0]
    monkeypatch.setattr(Native, "most_tokens", 1)
    assert not torch.equal(answer(model, [prompt(MOST)])[0], alone)


@pytest.mark.usefixtures("few")
def test_a_state_that_a_row_does_not_pass_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor refuses rows that all resume from the state before the prompt."""
    true = division.in_rows

    def wrong(step: Step) -> Step:
        row_step = true(step)
        if step.rows:
            row_step.inputs["read"].fill_(int(row_step.inputs["read"][0]))
        return row_step

    monkeypatch.setattr("tpcompile.runtime.ranks.program.in_rows", wrong)
    with tpcompile.compile(remembering(), max_seq_len=64) as model:
        past = model(torch.tensor([prompt(MOST + 1)]), use_cache=True).past_key_values
        with pytest.raises(UsageError, match="must read the state that the row before it writes"):
            model(torch.tensor([prompt(4)]), past_key_values=past)
