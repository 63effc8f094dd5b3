"""What passes have in common: a golden, matches, numbers, and a second run that changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest

from tests.passes.decoding import DECODE, DecodeStep, decode_step
from tests.passes.graphs import nearest
from tests.passes.steps import SEQUENCE_PARALLEL, Step, step

QWEN2, QWEN3, HYBRID, MIXTURE = "tiny-qwen2", "tiny-qwen3", "tiny-qwen3.5", "tiny-qwen3-moe"


@dataclass(frozen=True)
class Case:
    """The behaviour of a pass on small models of two layers, of four if they are hybrid."""

    matches: Mapping[str, int]
    ranks: tuple[int, ...]
    """The numbers of ranks whose numbers are compared, for each model with matches."""
    same_bits: bool = True
    """Whether the logits keep their bits; otherwise they are near."""
    golden: str = QWEN3
    """The model of the golden file."""
    again: int | str = 0
    """The matches of a second run, or why its nearest candidate does not match."""


def both(matches: int) -> dict[str, int]:
    return {QWEN2: matches, QWEN3: matches}


FEW, ALL = (2, 3, 4), (1, 2, 3, 4)
CASES = {
    "canonicalize": Case({QWEN2: 18, QWEN3: 26}, (4,), golden=QWEN2),
    "raise-norm": Case({QWEN2: 2 * 2 + 1, QWEN3: 4 * 2 + 1}, (4,)),
    # A decay, a gated norm and its merge in each linear attention, and the gate of attention.
    "raise-gates": Case({HYBRID: 3 * 3 + 1, QWEN3: 0}, (4,), golden=HYBRID),
    "raise-rope": Case(both(2 * 2), (4,), golden=QWEN2),
    "raise-swiglu": Case(both(2), (4,)),
    "raise-experts": Case({MIXTURE: 2, QWEN3: 0}, (4,), golden=MIXTURE),
    # The token-major form matches too.
    "raise-attention": Case(both(2), (4,), again=2),
    # All linears of a layer but those of KV heads.
    "shard-linears": Case(both(2 * 5), FEW, same_bits=False),
    "kv-heads": Case(both(2 * 2), (2, 3, 4, 6), same_bits=False),
    # The embedding and the head.
    "vocab-parallel": Case(both(2), FEW, same_bits=False),
    "insert-collectives": Case(both(2 * 2 + 2), FEW),
    "sequence-parallel": Case(both(2 * 2 + 1), ALL),
    # Gate and up are then outputs of a split.
    "fuse-gate-up": Case(both(2), ALL, same_bits=False, again="it is not computed by a linear"),
    # The first norm has no sum to fuse with: its operand is the embedding.
    "fuse-add-norm": Case(both(2 * 2 + 1 - 1), ALL, again="its input is not a sum"),
    "greedy-head": Case(both(1), ALL),
    # The first step reads only its own tokens.
    "cache-kv": Case(both(2), ALL),
    # Twice a layer of linear attention. Simulated ranks have NaN in states, which are not read.
    "keep-states": Case({HYBRID: 6, QWEN3: 0}, (1, 2, 3, 5), golden=HYBRID),
    "fuse-norm-gate-up": Case(both(2), ALL),
    "fuse-norm-linear": Case(both(1), ALL),
    "split-attention": Case(both(2), (), same_bits=False),
}
"""The other passes have goldens, numbers or second runs of their own, in their own files."""


def step_at(name: str, model: str = QWEN3, tp: int = 4) -> Step | DecodeStep:
    """Return a pass at its place in a pipeline."""
    if name in DECODE:
        return decode_step(name, model, tp)
    return step(name, model, tp, SEQUENCE_PARALLEL if name == "sequence-parallel" else "")


def plain(name: str, model: str = QWEN3) -> Step:
    """Return a pass for checks that run no decode step."""
    current = step_at(name, model)
    return current.plain if isinstance(current, DecodeStep) else current


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"passes/{name.replace('-', '_')}.txt", plain(name, CASES[name].golden).diff())


@pytest.mark.parametrize("name", CASES)
def test_matches(name: str) -> None:
    for model, matches in CASES[name].matches.items():
        assert plain(name, model).matches == matches, model


@pytest.mark.parametrize(
    ("name", "model", "tp"),
    [
        (name, model, tp)
        for name, case in CASES.items()
        for model, matches in case.matches.items()
        for tp in case.ranks
        if matches
    ],
)
def test_numbers(name: str, model: str, tp: int) -> None:
    """They are those of the stage before, and near Hugging Face's."""
    current = step_at(name, model, tp)
    if CASES[name].same_bits:
        current.assert_same_bits()
    current.assert_near()


@pytest.mark.parametrize("name", CASES)
def test_again(name: str) -> None:
    """A second run gives the same text."""
    case = CASES[name]
    report = plain(name, case.golden).again()
    if isinstance(case.again, str):
        assert case.again in nearest(report)
    else:
        assert report.matches == case.again
