"""Libraries that compile schemas and compute masks, behind one interface."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import numpy as np

from benchmarks.grammars.records import record

Compile = Callable[[str], tuple[Any, Callable[[Any], None], Callable[[Any, int], bool]]]
"""Compiles a schema to a matcher; returns it, and how it fills a mask and accepts a token."""


@dataclass
class Timed:
    """Milliseconds for a schema of a size."""

    size: int
    compile_ms: list[float] = field(default_factory=list)
    """The first one, and later ones."""
    mask_ms: list[float] = field(default_factory=list)
    """For each token of an instance."""

    def to_json(self) -> dict[str, Any]:
        first, *later = self.compile_ms
        masks = np.array(self.mask_ms)
        return {
            "bytes": self.size,
            "first_ms": first,
            "later_ms": max(later),
            "mask_mean_ms": mean(self.mask_ms),
            "mask_p99_ms": float(np.quantile(masks, 0.99)),
            "mask_max_ms": float(masks.max()),
        }


def llguidance_side(tokenizer: Any, size: int) -> Compile:
    """Return tpcompile's own use of llguidance."""
    from tpcompile.serving.grammars import Grammars
    from tpcompile.serving.structure import JSON_SCHEMA, Structure

    ends = frozenset([tokenizer.eos_token_id])
    grammars = Grammars(tokenizer, size, ends)

    def accept(matcher: Any, token: int) -> bool:
        matcher.accept(token)
        return True

    def compiled(schema: str) -> Any:
        grammars.forget()
        matcher = grammars.grammar(Structure(JSON_SCHEMA, schema)).matcher(ends)
        return matcher, lambda current: current.forbidden(), accept

    return compiled


def xgrammar_side(tokenizer: Any, size: int) -> Compile:
    """Return xgrammar as its documentation uses it, with one thread and without its cache."""
    import xgrammar

    about = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size)
    compiler = xgrammar.GrammarCompiler(about, max_threads=1, cache_enabled=False)
    mask = xgrammar.allocate_token_bitmask(1, size)

    def compiled(schema: str) -> Any:
        matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(schema))
        return (
            matcher,
            lambda current: current.fill_next_token_bitmask(mask),
            lambda current, token: current.accept_token(token),
        )

    return compiled


SIDES = {"llguidance": llguidance_side, "xgrammar": xgrammar_side}


def timed(compiled: Compile, tokenizer: Any, size: int, turns: int) -> Timed:
    """Compile a record of a size several times, and compute the masks of its instance."""
    schema, instance = record(size)
    timing = Timed(len(schema))
    for _ in range(turns):
        gc.collect()
        begun = time.perf_counter()
        matcher, fill, accept = compiled(schema)
        timing.compile_ms.append(1e3 * (time.perf_counter() - begun))
    for token in tokenizer.encode(instance):
        begun = time.perf_counter()
        fill(matcher)
        timing.mask_ms.append(1e3 * (time.perf_counter() - begun))
        if not accept(matcher, token):
            raise ValueError(f"Token {token} of an instance is refused")
    return timing
