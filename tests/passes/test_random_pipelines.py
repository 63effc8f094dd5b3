"""Random pipelines preserve the captured numbers, or are refused with a reason about the order."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import lru_cache

import pytest
import torch
from transformers import AutoConfig

from tests.models import TOLERANCE, Pair, batch, pair_of, relative_error, stage_logits
from tpcompile.errors import CompileError
from tpcompile.ir.ops import CACHED_ATTENTION, NORM_QKV_ROPE_APPEND, PARTIAL_ATTENTION
from tpcompile.passes import (
    PASSES,
    decode_pipeline,
    default_pipeline,
    for_ranks,
    parse_pipeline,
    run_passes,
)
from tpcompile.presets import preset
from tpcompile.rewriting.manager import FailedPassError

VOCABULARY = 61
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
}
MODELS = ("tiny-qwen2", "tiny-qwen3")
"""One model with biases, one with per-head norms."""
PROMPTS, STEPS = (3, 1, 5), (1, 1, 1)
"""Lengths of the sequences; decode graphs take one new token per sequence."""
DECODING = (NORM_QKV_ROPE_APPEND, CACHED_ATTENTION, PARTIAL_ATTENTION)
OPTIONS = {
    "cache-kv": ("", "{block=4}", "{block=1}"),
    "split-attention": ("", "{spans=3}"),
    "plan-sharding": ("", "", "{ffn_grain=4}", "{vocab_grain=1}"),
}
ORDER = re.compile(r"[a-z-]+ must run (after|before) [a-z-]+")


@lru_cache
def small(model: str) -> Pair:
    return pair_of(AutoConfig.for_model(**{**preset(model), **SMALL}))


@lru_cache
def expected(model: str, lengths: tuple[int, ...]) -> torch.Tensor:
    pair = small(model)
    return stage_logits(pair.captured.graph, pair, batch(lengths, VOCABULARY))


def pipelines(count: int, seed: int) -> Iterator[tuple[str, int, str]]:
    """Yield model, ranks and pipeline text, with passes removed, inserted, moved or shuffled."""
    dice = random.Random(seed)
    wholes = [[p.name for p in made()] for made in (default_pipeline, decode_pipeline)]
    for _ in range(count):
        names = list(dice.choice([*wholes, *wholes, list(PASSES)]))
        for _ in range(dice.choice([0, 1, 1, 2, 2, 3, 5])):
            _disturb(names, dice)
        if dice.random() < 0.1:
            dice.shuffle(names)
        text = ",".join(name + dice.choice(OPTIONS.get(name, ("",))) for name in names)
        yield dice.choice(MODELS), dice.choice([1, 2, 2, 3, 4]), text


def _disturb(names: list[str], dice: random.Random) -> None:
    one, other = dice.randrange(len(names)), dice.randrange(len(names))
    match dice.randrange(4):
        case 0 if len(names) > 1:
            names.pop(one)
        case 1:
            names.insert(one, dice.choice(list(PASSES)))
        case 2:
            names.insert(other, names.pop(one))
        case _:
            names[one], names[other] = names[other], names[one]


def mistake(model: str, tp: int, text: str) -> str:
    """Run a pipeline; return a description of its mistake, or an empty string."""
    pair = small(model)
    try:
        gm, _ = run_passes(pair.captured.graph, for_ranks(parse_pipeline(text), tp))
    except FailedPassError as error:
        return f"left an invalid graph: {error}"
    except CompileError as error:
        return "" if ORDER.search(str(error)) else f"names no order: {error}"
    decode = any(node.target in DECODING for node in gm.graph.nodes)
    lengths = STEPS if decode else PROMPTS
    found = stage_logits(gm, pair, batch(lengths, VOCABULARY))
    error = relative_error(found, expected(model, lengths))
    return "" if error < TOLERANCE else f"other numbers, off by {error:.1e}"


def mistakes(count: int, seed: int) -> list[str]:
    found = []
    for model, tp, text in pipelines(count, seed):
        said = mistake(model, tp, text)
        if said:
            found.append(f"{model} tp={tp} {text}: {said}")
    return found


def test_a_random_pipeline_is_right_or_is_refused_for_its_order() -> None:
    assert mistakes(300, seed=9) == []


@pytest.mark.slow
def test_more_random_pipelines() -> None:
    assert mistakes(3000, seed=10) == []


_RAISED = "canonicalize,raise-norm,raise-rope,raise-swiglu,raise-attention,plan-sharding"


@pytest.mark.parametrize(
    ("text", "order"),
    [
        (f"{_RAISED},kv-heads,shard-linears", "kv-heads must run after shard-linears"),
        (
            f"{_RAISED},shard-linears,insert-collectives,fuse-norm-linear,vocab-parallel",
            "vocab-parallel must run before fuse-norm-linear",
        ),
        ("canonicalize,vocab-parallel", "vocab-parallel must run after plan-sharding"),
        (
            "canonicalize,raise-attention",
            "raise-attention must run after raise-norm and raise-rope",
        ),
        (f"{_RAISED},fuse-qkv,shard-linears", "shard-linears must run before fuse-qkv"),
        (
            "canonicalize,raise-norm,raise-rope,raise-swiglu,plan-sharding",
            "plan-sharding must run after raise-attention",
        ),
        (f"{_RAISED},fuse-qkv,interleave-rotary", "interleave-rotary must run before fuse-qkv"),
    ],
)
@pytest.mark.parametrize("model", MODELS)
def test_the_order_is_named(model: str, text: str, order: str) -> None:
    with pytest.raises(CompileError) as refused:
        run_passes(small(model).captured.graph, for_ranks(parse_pipeline(text), 2))
    assert not isinstance(refused.value, FailedPassError)
    assert order in str(refused.value)
