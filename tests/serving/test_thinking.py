"""Limits of thinking: forced tokens come in time, whatever else runs."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

import tpcompile
from tests.runtime.eager_pair import lively
from tests.serving.test_engine import SMALL, alone, prompt
from tpcompile.errors import UsageError
from tpcompile.serving import Engine, SamplingParams
from tpcompile.serving.thinking import Thinking, ThinkingRules

BEGIN, END = 1, 2
CLOSING = (3, END, 4)


@pytest.fixture(scope="module")
def model() -> Iterator[tpcompile.CompiledModel]:
    with tpcompile.compile(lively("tiny-qwen3"), max_seq_len=160) as compiled:
        yield compiled


def rules(**options: Any) -> ThinkingRules:
    return ThinkingRules(BEGIN, END, **{"budget": 3, "closing": CLOSING} | options)


def forced_by(rules: ThinkingRules, tokens: list[int]) -> list[int]:
    """Return the tokens of a model that would write `tokens`."""
    thinking, written = Thinking(rules), []
    for token in tokens:
        written.append(token if thinking.forced is None else thinking.forced)
        thinking.read(written[-1])
    return written


CASES: dict[str, tuple[ThinkingRules, list[int], list[int]]] = {
    "too long": (rules(), [BEGIN, 7, 7, 7, 7, 7, 7, 7, 7], [BEGIN, 7, 7, 7, *CLOSING, 7, 7]),
    "just long enough": (rules(), [BEGIN, 7, 7, END, 7, 7, 7], [BEGIN, 7, 7, END, 7, 7, 7]),
    "the end is one too late": (rules(), [BEGIN, 7, 7, 7, END, 7, 8], [BEGIN, 7, 7, 7, *CLOSING]),
    "no thinking": (rules(), [7] * 9, [7] * 9),
    "after a line break": (rules(), [9, BEGIN, *[7] * 7], [9, BEGIN, 7, 7, 7, *CLOSING, 7]),
    "twice": (rules(), [BEGIN, END, BEGIN, *[7] * 6], [BEGIN, END, BEGIN, *[7] * 6]),
    "begun": (rules(begun=True), [7] * 8, [7, 7, 7, *CLOSING, 7, 7]),
    "begun and written again": (
        rules(begun=True),
        [BEGIN, *[7] * 7],
        [BEGIN, 7, 7, *CLOSING, 7, 7],
    ),
    "nothing": (rules(budget=0), [BEGIN, 7, 7, 7, 7], [BEGIN, *CLOSING, 7]),
    "nothing, begun": (rules(budget=0, begun=True), [7] * 5, [*CLOSING, 7, 7]),
    "required": (rules(required=True), [7] * 8, [BEGIN, 7, 7, 7, *CLOSING, 7]),
    "required without a budget": (rules(required=True, budget=None), [7] * 4, [BEGIN, 7, 7, 7]),
    "required although begun": (rules(required=True, begun=True), [7] * 4, [7, 7, 7, CLOSING[0]]),
    "without closing tokens": (rules(closing=()), [BEGIN, *[7] * 6], [BEGIN, 7, 7, 7, END, 7, 7]),
}


@pytest.mark.parametrize("name", CASES)
def test_which_tokens_are_forced(name: str) -> None:
    case, tokens, expected = CASES[name]
    assert forced_by(case, tokens) == expected


@pytest.mark.parametrize("logprobs", [None, 1])
def test_forced_tokens_do_not_depend_on_others(model: Any, logprobs: int | None) -> None:
    """A request goes on from forced tokens as it would from the same prompt, among others."""
    dice = Random(5)
    with Engine(model, max_batch=3, kv_tokens=256, **SMALL) as engine:
        handles = []
        for place in range(8):
            tokens = prompt(dice, dice.randrange(1, 60))
            limit = rules(begun=True, budget=dice.randrange(6)) if place % 2 else None
            params = SamplingParams(
                max_tokens=14, ignore_eos=True, thinking=limit, logprobs=logprobs
            )
            handles.append((tokens, limit, engine.add(tokens, params)))
        for tokens, limit, handle in handles:
            (completion,) = handle.result()
            budget = 14 if limit is None else limit.budget or 0
            thought = alone(model, tokens, budget) if budget else []
            forced = [] if limit is None else list(CLOSING)
            remaining = 14 - len(thought) - len(forced)
            after = alone(model, [*tokens, *thought, *forced], remaining) if remaining else []
            assert completion.tokens == [*thought, *forced, *after]
            if logprobs and forced:
                place = len(thought)
                below = [chosen.logprob < chosen.top[0][1] for chosen in completion.chosen]
                assert any(below[place : place + len(forced)]) and not any(below[:place])


def test_several_continuations_think_apart(model: Any) -> None:
    params = SamplingParams(
        n=3, temperature=1.0, seed=4, max_tokens=10, ignore_eos=True, thinking=rules(begun=True)
    )
    with Engine(model, max_batch=4, **SMALL) as engine:
        completions = engine.add([5, 6, 7], params).result()
    assert all(tuple(completion.tokens[3:6]) == CLOSING for completion in completions)
    assert len({tuple(completion.tokens) for completion in completions}) == 3


def test_one_continuation_is_ended(model: Any) -> None:
    params = SamplingParams(n=3, max_tokens=20, ignore_eos=True)
    with Engine(model, max_batch=4, **SMALL) as engine:
        handle = engine.add([5, 6, 7], params)
        finishes = {}
        for event in handle:
            if event.index == 0 and event.chosen is not None and 0 not in finishes:
                handle.abort(1)
                finishes[0] = ""
            if event.finish:
                finishes[event.index] = event.finish
        assert finishes == {0: "length", 1: "abort", 2: "length"}
        assert engine.scheduler.blocks.available == engine.scheduler.limits.blocks


@pytest.mark.parametrize("budget", [-1, True, 1.5, "3"])
def test_bad_budgets(budget: Any) -> None:
    with pytest.raises(UsageError, match="must be an integer of at least 0"):
        rules(budget=budget)


def test_bad_rules(model: Any) -> None:
    with pytest.raises(UsageError, match="must contain its end"):
        rules(closing=(3, 4))
    with pytest.raises(UsageError, match="thinking must be ThinkingRules or None, got 3"):
        SamplingParams(thinking=3)  # type: ignore[arg-type]
    with Engine(model, max_batch=1, **SMALL) as engine, pytest.raises(UsageError, match="got 9999"):
        engine.add([5], SamplingParams(thinking=ThinkingRules(9999, END)))
