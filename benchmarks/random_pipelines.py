"""Random pipelines on tiny models: each is proved, or refused with a reason about the order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from random import Random

import torch
from torch import fx

from benchmarks.mutations.subjects import Subject
from tpcompile.errors import CompileError
from tpcompile.ir.ops import DECODE_OPS
from tpcompile.ir.simulate import logits_of, materialise, run_ranks
from tpcompile.passes import (
    PASSES,
    Stage,
    decode_pipeline,
    default_pipeline,
    for_ranks,
    parse_pipeline,
    run_passes,
)
from tpcompile.presets import preset
from tpcompile.rewriting.manager import FailedPassError

MODELS = ("tiny-qwen2", "tiny-qwen3", "tiny-qwen3-moe", "tiny-qwen3.5", "tiny-qwen3.5-moe")
"""With biases, with per-head norms, with experts, with linear attention, and with both."""
TOLERANCE = 1e-5
"""Limit on the error of fp32 logits, relative to the largest."""
PROVED = "proved, with the captured numbers"
ORDERED = "refused, with the order named"
OTHER_NUMBERS = "accepted, with other numbers"
NOT_PROVED = "not proved"
INVALID = "refused for an invalid graph or another value"
UNORDERED = "refused without an order"
KINDS = (PROVED, ORDERED, OTHER_NUMBERS, NOT_PROVED, INVALID, UNORDERED)
"""The results of pipelines; all but the first two are mistakes."""
_PROMPTS, _STEPS = (3, 1, 5), (1, 1, 1)
"""Lengths of the sequences; decode graphs take one new token per sequence."""
_OPTIONS = {
    "cache-kv": ("", "{block=4}", "{block=1}"),
    "split-attention": ("", "{spans=3}"),
    "plan-sharding": ("", "", "{ffn_grain=4}", "{vocab_grain=1}"),
}
_ORDER = re.compile(r"[a-z-]+ must run (after|before) [a-z-]+")


@dataclass(frozen=True)
class RandomPipeline:
    """A pipeline as text, for a model on some ranks."""

    model: str
    tp: int
    text: str

    def __str__(self) -> str:
        return f"{self.model} tp={self.tp} {self.text}"


@dataclass(frozen=True)
class Outcome:
    """What became of a pipeline, and the message."""

    pipeline: RandomPipeline
    kind: str
    said: str = ""

    @property
    def is_mistake(self) -> bool:
        return self.kind not in (PROVED, ORDERED)

    def __str__(self) -> str:
        return f"{self.kind}: {self.pipeline}: {self.said}"


def random_pipelines(count: int, seed: int) -> Iterator[RandomPipeline]:
    """Yield pipelines with passes removed, inserted, moved or shuffled."""
    dice = Random(seed)
    wholes = [[p.name for p in make()] for make in (default_pipeline, decode_pipeline)]
    for _ in range(count):
        names = list(dice.choice([*wholes, *wholes, list(PASSES)]))
        for _ in range(dice.choice([0, 1, 1, 2, 2, 3, 5])):
            _disturb(names, dice)
        if dice.random() < 0.1:
            dice.shuffle(names)
        text = ",".join(name + dice.choice(_OPTIONS.get(name, ("",))) for name in names)
        yield RandomPipeline(dice.choice(MODELS), dice.choice([1, 2, 2, 3, 4]), text)


def _disturb(names: list[str], dice: Random) -> None:
    place, other = dice.randrange(len(names)), dice.randrange(len(names))
    match dice.randrange(4):
        case 0 if len(names) > 1:
            names.pop(place)
        case 1:
            names.insert(place, dice.choice(list(PASSES)))
        case 2:
            names.insert(other, names.pop(place))
        case _:
            names[place], names[other] = names[other], names[place]


def outcomes(count: int, seed: int) -> Iterator[Outcome]:
    """Run random pipelines, and compare the numbers of those that are accepted."""
    return map(outcome_of, random_pipelines(count, seed))


def outcome_of(pipeline: RandomPipeline) -> Outcome:
    """Run one pipeline on its model."""
    passes = for_ranks(parse_pipeline(pipeline.text), pipeline.tp)
    try:
        gm, stages = run_passes(subject(pipeline.model).captured.graph, passes)
    except FailedPassError as error:
        return Outcome(pipeline, INVALID, str(error))
    except CompileError as error:
        match = _ORDER.search(str(error))
        return Outcome(pipeline, ORDERED if match else UNORDERED, str(error))
    unproved = unproved_of(stages)
    if unproved:
        return Outcome(pipeline, NOT_PROVED, unproved)
    wrong = _wrong_numbers(gm, pipeline.model)
    return Outcome(pipeline, OTHER_NUMBERS if wrong else PROVED, wrong)


def unproved_of(stages: Iterable[Stage]) -> str:
    """Return the passes that are not proved, with the reasons; "" if all are."""
    return "; ".join(f"{stage.name}: {why}" for stage in stages if (why := stage.stats.unproved))


@lru_cache
def subject(model: str) -> Subject:
    return Subject(model, preset(model), ())


def _wrong_numbers(gm: fx.GraphModule, model: str) -> str:
    """Describe how the ranks' results differ from those of the captured graph; "" if equal."""
    decodes = any(node.target in DECODE_OPS for node in gm.graph.nodes)
    lengths = _STEPS if decodes else _PROMPTS
    (expected,) = _logits(subject(model).captured.graph, model, lengths)
    logits, *remaining = _logits(gm, model, lengths)
    if not all(torch.equal(logits, other) for other in remaining):
        return "ranks disagree"
    relative = float((logits - expected).abs().max() / expected.abs().max())
    return "" if relative <= TOLERANCE else f"off by {relative:.1e}"


def _logits(gm: fx.GraphModule, model: str, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """Return the logits of each rank."""
    starts = torch.tensor([0, *lengths]).cumsum(0)
    tokens = torch.arange(int(starts[-1]))
    inputs = {
        "input_ids": tokens * 97 % subject(model).values["vocab_size"],
        "positions": tokens - torch.repeat_interleave(starts[:-1], torch.tensor(lengths)),
        "starts": starts,
        "logit_rows": tokens,
    }
    with torch.inference_mode():
        weights = materialise(gm, subject(model).read)
        return logits_of(run_ranks(gm, inputs, weights, subject(model).captured.rotary.fresh()))
