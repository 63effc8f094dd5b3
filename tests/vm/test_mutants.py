"""The verifier refuses exactly the unsafe ones of thousands of programs with a mistake.

The programs are lowered from small models, on one rank and several, with all policies. The oracle
of `tpcompile.vm.proof.oracle` determines which are unsafe, and the reference machine confirms it.
`python -m tests.vm.mutants` prints the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from tests.vm.mutants.__main__ import main
from tests.vm.mutants.bases import Base
from tests.vm.mutants.judge import Judge
from tests.vm.mutants.running import (
    FEW_COME_RIGHT,
    MAY_COME_RIGHT,
    ONLY_DESCRIBED,
    comes_right,
    spoilt,
)
from tests.vm.mutants.table import KINDS, Count, Mutant, all_bases, judged, mutants_of
from tests.vm.mutants.traps import TRAPS
from tests.vm.mutants.words import BIASED, FEW_BITS, judged_words, word_mutants, words_of_kind
from tpcompile.errors import VerifyError
from tpcompile.vm.program import Program, agreement
from tpcompile.vm.program.agreement import Agreement
from tpcompile.vm.program.instruction import StepInstruction, word_count
from tpcompile.vm.program.instruction_set import INSTRUCTIONS
from tpcompile.vm.proof import verify
from tpcompile.vm.proof.cells import Parts
from tpcompile.vm.proof.done import Done
from tpcompile.vm.proof.oracle import broken
from tpcompile.vm.proof.verify import check_program, verify_program

EACH = 56
OTHERS = {
    "no_waits_between_steps": 27,
    "counters_cleared": 30,
    "residual_added_to_while_it_is_read": 47,
    "region_shifted": 112,
}
"""Counts that differ from `EACH`.

Some kinds have only one mutant per program or layer, and one kind is rarely unsafe.
"""
SAFE = ("buffer_reused_openly", "counter_split")
"""Kinds that are always or nearly always safe; refusing them is a false positive."""


def test_there_are_thousands() -> None:
    assert sum(OTHERS.get(kind, EACH) for kind in KINDS) >= 2000


@pytest.mark.parametrize("kind", KINDS)
def test_the_verifier_says_what_the_adversary_says(kind: str) -> None:
    count = OTHERS.get(kind, EACH)
    counts, strange = judged(kind, count)
    assert counts.mutants == count, counts
    assert counts.unsafe_accepted == 0, list(map(str, strange))
    assert counts.safe_refused <= 0.05 * counts.safe, list(map(str, strange))
    assert counts.unsafe or kind in SAFE, counts
    assert counts.safe or kind not in SAFE, counts


@pytest.mark.slow
def test_and_so_it_does_of_ten_thousand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["320", "0"]) == 0
    match = re.search(r"│ all +│ +(\d+)", capsys.readouterr().out)
    assert match is not None and int(match[1]) >= 10_000


@pytest.mark.parametrize("base", all_bases(), ids=str)
def test_no_program_that_lowering_makes_is_refused(base: Base) -> None:
    assert 30 <= len(base.program.instructions) <= 350
    assert not Judge().broken(base.program)
    assert check_program(base.program) == []


def _agrees(kind: str, count: int) -> None:
    judge = Judge()
    small = (m for m in mutants_of(kind, EACH, 1) if len(m.program.instructions) < 140)
    for mutant in islice(small, count):
        assert judge.broken(mutant.program) is broken(mutant.program), str(mutant)


@pytest.mark.parametrize("kind", KINDS)
def test_the_hurried_adversary_says_what_the_plain_one_says(kind: str) -> None:
    _agrees(kind, 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_and_so_it_does_of_many(kind: str) -> None:
    _agrees(kind, 15)


def _come_wrong(kind: str, count: int) -> list[bool]:
    judge = Judge()
    unsafe = (m for m in mutants_of(kind, OTHERS.get(kind, EACH), 2) if judge.broken(m.program))
    return [spoilt(mutant, judge) for mutant in islice(unsafe, count)]


RUN = [kind for kind in KINDS if kind not in ONLY_DESCRIBED and kind not in SAFE]


@pytest.mark.parametrize("kind", [kind for kind in RUN if kind not in MAY_COME_RIGHT])
def test_what_can_go_wrong_is_made_to_go_wrong(kind: str) -> None:
    """The reference machine gives other bits or NaN, or deadlocks, in the adversary's order."""
    assert _come_wrong(kind, 1) == [True]


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUN)
def test_and_so_are_many(kind: str) -> None:
    wrong = _come_wrong(kind, 15)
    assert any(wrong) if kind in FEW_COME_RIGHT else all(wrong), wrong


HARMLESS = (
    *("queue_changed", "wait_added", "region_shifted", "buffer_reused"),
    *("instruction_left_out", "written_too_late", "own_result_read"),
    *SAFE,
)


def _come_right(kind: str, count: int) -> list[bool]:
    accepted = (m for m in mutants_of(kind, EACH, 3) if not check_program(m.program))
    return [comes_right(m, seed) for seed, m in enumerate(islice(accepted, count))]


@pytest.mark.parametrize("kind", HARMLESS)
def test_what_is_accepted_comes_right(kind: str) -> None:
    assert _come_right(kind, 2) == [True] * 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", HARMLESS)
def test_and_so_do_many(kind: str) -> None:
    assert _come_right(kind, 20) == [True] * 20


_RACE = "the second can run first"
_THRESHOLD = r"waits for \d+ signals of counter \d+, which gets \d+"
SAID: dict[str, str] = {
    "barrier_count_written_down": rf"{_THRESHOLD}|{_RACE}|never run",
    "partial_does_not_wait_for_q": (
        r"norm_qkv_\w+ q layer (\d) .* writes( a block of)? q\[.*\] and "
        rf"partial_attention layer \1 .* reads q\[.*\]; {_RACE}"
    ),
    "partial_does_not_wait_for_the_new_token": (
        r"norm_qkv_\w+ [kv] layer (\d) .* writes( a block of)? cache\[.*1:2\] and "
        rf"partial_attention layer \1 .* reads cache\[.*1:2\]; {_RACE}"
    ),
    "residual_added_to_while_it_is_read": (
        rf"norm_gate_up_swiglu layer (\d) .* reads (x\d)\[.*linear_terms mlp layer \1 .* writes \2"
        rf"|linear_terms mlp layer \d .* writes (x\d)\[.*linear_terms mlp .* writes x\d.*{_RACE}"
    ),
    "terms_added_in_any_order": (
        r"linear_terms (\w+) layer (\d) .* writes (\w+)\[.*\] and "
        rf"linear_terms \1 layer \2 .* writes \3\[.*\]; {_RACE}"
    ),
    "counter_of_two_producers": (
        rf"(reads|writes|writes a block of) \w+\[.*{_RACE}|never run|{_THRESHOLD}"
    ),
    "queue_by_length_alone": r"never run; .* waits for counter \d+ ≥ \d+",
    "clock_trusted": (
        rf"writes( a block of)? \w+\[.*\] and .* (reads|writes|writes a block of) .*{_RACE}"
    ),
    "no_waits_between_steps": r"can start before the previous step is complete: neither it nor",
    "counters_cleared": (
        r"\(instruction \d+\) (writes|reads|writes a block of) (\w+)\[.*\] and "
        rf".*\(instruction \d+\) (writes|reads|writes a block of) \2\[.*{_RACE}"
    ),
}
"""What the verifier reports for each trap: the writer, the reader and the location."""


@pytest.mark.parametrize(
    ("trap", "kind"),
    [(trap, kind.__name__) for trap, kinds in TRAPS.items() for kind in kinds],
)
def test_traps_are_refused_in_words(trap: int, kind: str) -> None:
    judge = Judge()
    unsafe = [m for m in mutants_of(kind, 12, trap) if judge.broken(m.program)]
    assert len(unsafe) >= 5
    for mutant in unsafe:
        messages = [fault.message for fault in check_program(mutant.program)]
        assert any(re.search(SAID[kind], message) for message in messages), (
            str(mutant),
            messages[:5],
        )
    with pytest.raises(VerifyError, match="The program is not valid"):
        verify_program(unsafe[0].program)


WORDS = 30
"""The number of mutants with one wrong word, per kind of instruction."""


@pytest.mark.parametrize("kind", INSTRUCTIONS.values(), ids=lambda kind: kind.name)
def test_one_wrong_word_is_refused_or_does_no_harm(kind: type[StepInstruction]) -> None:
    counts, strange = judged_words(kind, WORDS, orders_each=4)
    assert counts.mutants == WORDS
    assert counts.refused >= WORDS // 2
    assert counts.unsafe_accepted == 0, list(map(str, strange))
    assert counts.safe_refused <= 0.05 * counts.safe, list(map(str, strange))


@pytest.mark.slow
def test_and_so_are_five_thousand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["0", "460"]) == 0
    match = re.search(r"│ all +│ +(\d+)", capsys.readouterr().out)
    assert match is not None and int(match[1]) >= 5_000


def test_every_word_can_be_the_wrong_one() -> None:
    for kind in INSTRUCTIONS.values():
        words = words_of_kind(kind)
        assert len(words) == word_count(kind)
        changed = {word for m in word_mutants(kind, 10 * len(words)) for word in m.changed}
        assert changed == set(words)


WITH_BIAS = [
    kind
    for kind in INSTRUCTIONS.values()
    if any(word.path == "bias" for word in words_of_kind(kind))
]


def _wrong_biases(kind: type[StepInstruction]) -> Count:
    return judged_words(kind, 24, bases=BIASED, orders_each=8, operand="bias")[0]


@pytest.mark.parametrize("kind", WITH_BIAS, ids=lambda kind: kind.name)
def test_a_wrong_bias_is_refused_or_does_no_harm(kind: type[StepInstruction]) -> None:
    """A buffer of another shape is refused; another layer's bias, or none, is a valid program."""
    counts = _wrong_biases(kind)
    assert counts.mutants >= 12
    assert counts.unsafe_accepted == 0 < counts.refused
    assert counts.safe_refused == 0


def test_biases_that_nobody_compares_with_their_buffers_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = Agreement._absent
    monkeypatch.setattr(
        Agreement, "_absent", lambda self, named: named.path == "bias" or right(self, named)
    )
    assert any(_wrong_biases(kind).unsafe_accepted for kind in WITH_BIAS)


OPERANDS = {
    "format": ("embed", "linear_residual", "norm_qkv_rope_append", "norm_lm_head"),
    "weight": ("linear_terms", "linear_residual", "norm_qkv_rows", "norm_gate_up_swiglu"),
    "columns.start": ("linear_terms",),
    "columns.stop": ("linear_terms",),
    "": ("linear_terms", "linear_residual", "norm_gate_up_swiglu", "norm_lm_head"),
}
"""Instructions on weights of few bits, by the operand that is wrong; any operand if it is empty."""


@pytest.mark.parametrize(
    ("operand", "name"), [(operand, name) for operand, names in OPERANDS.items() for name in names]
)
def test_a_wrong_word_on_weights_of_few_bits(operand: str, name: str) -> None:
    counts, strange = judged_words(
        INSTRUCTIONS[name], 16, 1, FEW_BITS, orders_each=8, operand=operand
    )
    assert counts.mutants == 16
    assert counts.unsafe_accepted == 0, list(map(str, strange))
    assert counts.safe_refused == 0, list(map(str, strange))
    assert counts.refused


def test_formats_that_nobody_compares_with_their_buffers_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agreement, "FormatOf", type("Unused", (), {}))
    counts, _ = judged_words(INSTRUCTIONS["linear_terms"], 16, 1, FEW_BITS, 16, "format")
    assert counts.unsafe_accepted


def _nothing(*arguments: object) -> Any:
    return iter(())


def _one_worker(program: Program, *known: Parts) -> Any:
    return _TRUE(replace(program, sharing=1), *known)


class _Gullible(Done):
    def __init__(self, program: Program, order: list[int]) -> None:
        super().__init__(program, order)
        self._partial = set()


_TRUE = verify.check_program
HOLES: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "heads": ("rows_shifted", lambda patch: patch.setattr(verify, "check_heads", _nothing)),
    "steps": ("no_waits_between_steps", lambda patch: patch.setattr(Done, "unguarded", _nothing)),
    "order": ("wait_dropped", lambda patch: patch.setattr(verify, "_missing", lambda *a: None)),
    "undefined": (
        "own_result_read",
        lambda patch: patch.setattr(verify, "check_defined", _nothing),
    ),
    "queues": ("rank_changed", lambda patch: patch.setattr(verify, "check_queues", _nothing)),
    "partial thresholds count as complete": (
        "threshold_lowered",
        lambda patch: patch.setattr(verify, "Done", _Gullible),
    ),
    "workers sharing a queue keep its order": (
        "workers_added",
        lambda patch: patch.setattr("tests.vm.mutants.table.check_program", _one_worker),
    ),
}
"""Verifiers without one rule, and the kind of mutants that they then accept."""


@pytest.mark.parametrize("hole", HOLES)
def test_a_verifier_with_a_hole_is_found(hole: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, make = HOLES[hole]
    make(monkeypatch)
    counts, strange = judged(kind, 20)
    assert counts.unsafe_accepted > 0
    assert all(isinstance(mutant, Mutant) for mutant in strange)
