"""A compiled model and Hugging Face eager with the same weights, to compare their answers."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tpcompile
from tpcompile.presets import preset
from tpcompile.runtime.ranks.step import Step

PAD = 3
"""A padding token that the models do not define."""


def lively(name: str, **changes: Any) -> Any:
    """Return an eager preset with spread-out weights, so that its text does not repeat itself."""
    return enlivened(AutoConfig.for_model(**{**preset(name), "dtype": "float32", **changes}))


def enlivened(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Return an eager model with such weights; bf16 represents them exactly in any dtype."""
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), dtype=dtype, attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = parameter.dim() == 1 and not name.endswith("bias")
            spread = 0.1 if parameter.dim() == 1 else 0.3
            values = torch.randn(parameter.shape, generator=generator) * spread + scale
            parameter.copy_(values.bfloat16())  # neither ones nor zeros: a lost one shows
    return model


@dataclass(frozen=True)
class Both:
    """An eager and a compiled model, and methods that compare them."""

    eager: Any
    compiled: tpcompile.CompiledModel

    def each(self) -> Iterator[Any]:
        """Yield both models, each with the same random state."""
        for model in (self.eager, self.compiled):
            torch.manual_seed(11)
            yield model

    def generate(self, ids: torch.Tensor, **options: Any) -> list[Any]:
        """Generate with both models; the compiled model may log only what eager logs."""
        outputs, messages = [], []
        for model in self.each():
            with listening() as heard:
                outputs.append(model.generate(ids, **{"pad_token_id": PAD, **options}))
            messages.append(heard)
        assert set(messages[1]) <= set(messages[0])
        return outputs

    def same(self, ids: torch.Tensor, **options: Any) -> list[list[int]]:
        """Assert that both models generate the same tokens, and return them."""
        expected, actual = self.generate(ids, **options)
        assert actual.tolist() == expected.tolist()
        tokens: list[list[int]] = actual.tolist()
        return tokens


@lru_cache
def tiny_both() -> Both:
    """Return a tiny Qwen3 on two simulated ranks, for tests that do not modify it."""
    eager = lively("tiny-qwen3")
    return Both(eager, tpcompile.compile(eager, tp=2, simulate=True))


@contextmanager
def listening(*told: str) -> Iterator[list[str]]:
    """Collect log records of the libraries; Python's own warnings are errors in tests.

    Loggers with the names in `told` also report what they do.
    """
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    libraries = [logging.getLogger(name) for name in ("transformers", "tpcompile", "torch")]
    for library in libraries:
        library.addHandler(handler)
    for name in told:
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        yield heard
    finally:
        for name in told:
            logging.getLogger(name).setLevel(logging.NOTSET)
        for library in libraries:
            library.removeHandler(handler)


@contextmanager
def steps(model: tpcompile.CompiledModel) -> Iterator[list[Step]]:
    """Collect all steps that the ranks run."""
    recorded: list[Step] = []
    ranks = model._ranks
    run = ranks.run

    def spied(step: Step) -> torch.Tensor:
        recorded.append(step)
        return run(step)

    ranks.run = spied  # type: ignore[method-assign]
    try:
        yield recorded
    finally:
        ranks.run = run  # type: ignore[method-assign]


def prompt(*lengths: int, vocabulary: int = 900, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return random tokens, padded on the left like a tokenizer's."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.randint(PAD + 1, vocabulary, (len(lengths), longest), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        mask[row, : longest - length] = 0
    return {"input_ids": ids.where(mask.bool(), PAD), "attention_mask": mask}
