"""Programs are proved to compute their graph, and mistakes are refused in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any, ClassVar

import pytest
import torch

from tests.vm.groups.lowered import CASES, Case, graph, lowered, step_program
from tests.vm.mutants.table import all_bases
from tests.vm.mutants.values import changes_numbers, edits
from tpcompile.vm.groups import DeltaStep, Embed, NormGateUpSwiglu
from tpcompile.vm.program import Program
from tpcompile.vm.program.instruction import Memory, Probe, Range, StepInstruction, unseen
from tpcompile.vm.program.region import Region
from tpcompile.vm.proof.computes import NOT_CHECKED, Computed, check_values, has_meaning
from tpcompile.vm.proof.running import heads_of

PLAIN = Case()
SPLIT = Case("tiny-qwen3", 1, "heads", splits=4)
Steps = list[Any]
Mistake = Callable[[Steps], None]


def _graph(case: Case) -> Any:
    return graph(case.model, case.tp, case.spans, case.interleaved)


def _checked(case: Case, instructions: Sequence[Any]) -> Computed:
    low = lowered(case)
    none: tuple[tuple[Any, ...], ...] = ((),) * len(instructions)
    program = Program(low.buffers, tuple(instructions), (), none, none, low.ranks)
    return check_values(_graph(case), program)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_programs_compute_their_graph(case: Case) -> None:
    verdict = check_values(_graph(case), step_program(case))
    assert verdict.proved, verdict.faults
    assert verdict.summary == "yes, proved"


def _change(steps: Steps, kind: str, of_layer: int, **changed: Any) -> None:
    """Change shared operands of a kind of instruction in a layer; a callable maps the old ones."""
    places = [n for n, step in enumerate(steps) if step.name == kind and step.layer == of_layer]
    assert places
    for place in places:
        operands = steps[place].at
        new = {
            name: value(operands) if callable(value) else value for name, value in changed.items()
        }
        steps[place] = replace(steps[place], at=replace(operands, **new))


def _of_layer(steps: Steps, kind: str, layer: int) -> Any:
    return next(step for step in steps if step.name == kind and step.layer == layer).at


def _weight_of_another_layer(steps: Steps) -> None:
    other = _of_layer(steps, "norm_gate_up_swiglu", 0)
    _change(steps, "norm_gate_up_swiglu", 1, weight=other.weight)


def _norm_of_another_layer(steps: Steps) -> None:
    other = _of_layer(steps, "norm_gate_up_swiglu", 0).normed.weight
    _change(
        steps,
        "norm_gate_up_swiglu",
        1,
        normed=lambda operands: replace(operands.normed, weight=other),
    )


def _another_eps(steps: Steps) -> None:
    _change(
        steps, "norm_gate_up_swiglu", 1, normed=lambda operands: replace(operands.normed, eps=2e-6)
    )


def _another_scale(steps: Steps) -> None:
    _change(steps, "partial_attention", 1, scale=0.5)


def _cache_of_another_layer(steps: Steps) -> None:
    _change(steps, "partial_attention", 1, layer=0)


def _another_window(steps: Steps) -> None:
    _change(steps, "partial_attention", 0, window=4)


def _keys_for_values(steps: Steps) -> None:
    heads = [n for n, step in enumerate(steps) if step.name == "norm_qkv_rope_append"]
    for number in heads:
        operands = steps[number].at
        if operands.layer == 1 and operands.part.name in "KV":
            part, first = ("V", 128) if operands.part.name == "K" else ("K", 96)
            rows = {"part": type(operands.part)[part], "first_row": operands.first_row}
            assert first != operands.first_row
            steps[number] = replace(steps[number], at=replace(operands, **rows))


def _span_twice(steps: Steps) -> None:
    number = next(n for n, step in enumerate(steps) if step.name == "partial_attention")
    assert steps[number].span == Range(0, 2)
    first = replace(steps[number], span=Range(0, 1))
    steps[number : number + 1] = [first, first]


def _tile_missing(steps: Steps) -> None:
    number = [n for n, step in enumerate(steps) if step.name == "linear_residual"][-1]
    del steps[number]


def _tile_twice(steps: Steps) -> None:
    first, second, *_ = [n for n, step in enumerate(steps) if step.name == "norm_gate_up_swiglu"]
    steps[second] = steps[first]


def _residual_of_another_half(steps: Steps) -> None:
    other = _of_layer(steps, "norm_qkv_rope_append", 1).normed.x
    _change(
        steps, "norm_gate_up_swiglu", 1, normed=lambda operands: replace(operands.normed, x=other)
    )


def _own_result_as_residual(steps: Steps) -> None:
    places = [n for n, step in enumerate(steps) if step.name == "linear_residual"]
    last = steps[places[-1]].at
    for place in places:
        if steps[place].at is last:
            steps[place] = replace(steps[place], at=replace(last, residual=last.out))


def _token_chosen_twice(steps: Steps) -> None:
    steps.append(steps[-1])


def _head_reads_another(steps: Steps) -> None:
    for number, step in enumerate(steps):
        if step.name == "partial_attention" and step.layer == 1:
            steps[number] = replace(step, kv_head=1 - step.kv_head)


MISTAKES: tuple[tuple[Mistake, str], ...] = (
    (
        _weight_of_another_layer,
        "%l1_norm_gate_up_swiglu has %l1_gate_up_proj_weight, in linear of columns of aten.silu, "
        "where the program has %l0_gate_up_proj_weight",
    ),
    (_norm_of_another_layer, "where the program has %l0_post_attention_layernorm_weight"),
    (
        _another_eps,
        "%l1_norm_gate_up_swiglu has eps=1e-06, in tpc.rms_norm of linear of columns, where the "
        "program has 2e-06",
    ),
    (_another_scale, "has scale=0.25, in values of spans, where the program has 0.5"),
    (_cache_of_another_layer, "partial_attention layer 0 rank 0"),
    (_another_window, "has window=None, in values of spans, where the program has 4"),
    (_keys_for_values, "norm_qkv_rope_append"),
    (
        _span_twice,
        "reads values from partial_values, but no instruction before it stores partial_values[",
    ),
    (_tile_missing, "reads normed.x from x0, but no instruction before it stores x0["),
    (_tile_twice, "reads x from swiglu, but no instruction before it stores swiglu["),
    (
        _residual_of_another_half,
        "%l1_norm_gate_up_swiglu has %l1_linear_residual, in tpc.rms_norm of linear of columns, "
        "where the program has %l0_linear_residual_1",
    ),
    (_own_result_as_residual, "linear_residual mlp layer 1"),
    (_token_chosen_twice, "change"),
    (_head_reads_another, "(0, 0, 0, 1, 1, 1), in values of spans"),
)


@pytest.mark.parametrize(
    ("mistake", "message"), MISTAKES, ids=lambda value: getattr(value, "__name__", "")
)
def test_mistakes_are_refused_in_words(mistake: Mistake, message: str) -> None:
    steps: Steps = list(lowered(PLAIN).instructions)
    mistake(steps)
    (fault,) = _checked(PLAIN, steps).faults
    assert fault.rule == "values" and message in fault.message, fault.message


def test_a_message_names_all_layers_with_a_mistake() -> None:
    """Layers that only read wrong values have none."""
    for of_layers, ending in ((range(2), ". This mistake is in layers 0 to 1"), (range(1), "0.5")):
        steps: Steps = list(lowered(PLAIN).instructions)
        for layer in of_layers:
            _change(steps, "partial_attention", layer, scale=0.5)
        (fault,) = _checked(PLAIN, steps).faults
        assert "partial_attention layer 0" in fault.message
        assert fault.message.endswith(ending), fault.message


def test_terms_of_another_site_are_refused() -> None:
    steps: Steps = list(lowered(SPLIT).instructions)
    other = _of_layer(steps, "all_reduce", 0).terms
    sums = [step for step in steps if step.name == "all_reduce" and step.layer == 1]
    assert {step.at.terms for step in sums} > {other}
    for number, step in enumerate(steps):
        if step.name == "all_reduce" and step.layer == 1:
            steps[number] = replace(step, at=replace(step.at, terms=other))
    (fault,) = _checked(SPLIT, steps).faults
    assert "all_reduce" in fault.message and "layer 1" in fault.message, fault.message


@pytest.mark.parametrize("other", [0, 2])
def test_a_term_in_another_slot_is_refused(other: int) -> None:
    steps: Steps = list(lowered(SPLIT).instructions)
    number = next(
        n for n, step in enumerate(steps) if step.name == "linear_terms" and step.slot == 1
    )
    steps[number] = replace(steps[number], slot=other)
    (fault,) = _checked(SPLIT, steps).faults
    assert "but no instruction before it stores" in fault.message, fault.message


def test_gate_and_up_that_are_swapped_are_refused() -> None:
    case = next(case for case in CASES if case.model == "apart")
    steps: Steps = list(lowered(case).instructions)
    gate, up = (_of_layer(steps, kind, 1) for kind in ("norm_gate", "norm_gated_up"))
    shift = up.weight - gate.weight
    _change(steps, "norm_gate", 1, weight=lambda operands: operands.weight + shift)
    _change(steps, "norm_gated_up", 1, weight=lambda operands: operands.weight - shift)
    (fault,) = _checked(case, steps).faults
    assert "norm_gate layer 1" in fault.message, fault.message
    assert "l1_up_proj_weight" in fault.message, fault.message


def test_states_of_another_layer_are_refused() -> None:
    case = next(case for case in CASES if case.model == "tiny-qwen3.5")
    steps: Steps = list(lowered(case).instructions)
    _change(steps, DeltaStep.name, 1, layer=0)
    assert _checked(case, steps).faults


def test_rows_of_a_sequence_step_one_after_the_other() -> None:
    case = next(case for case in CASES if case.model == "tiny-qwen3.5")
    steps = [
        replace(step, at=replace(step.at, sequence_rows=2))
        if hasattr(step.at, "sequence_rows")
        else step
        for step in lowered(case).instructions
    ]
    assert _checked(case, steps).proved
    places = [n for n, step in enumerate(steps) if isinstance(step, DeltaStep) and step.rank == 0]
    rows = [n for n in places if steps[n].at == steps[places[0]].at]
    swapped = list(steps)
    for number, other in zip(rows, reversed(rows), strict=True):
        swapped[number] = steps[other]
    (fault,) = _checked(case, swapped).faults
    assert "but not all of the rows before its own have been stored" in fault.message


def test_values_that_are_overwritten_beside_what_an_instruction_makes_are_lost() -> None:
    case = next(case for case in CASES if case.model == "apart")
    low = lowered(case)
    steps: Steps = list(low.instructions)
    rows = [n for n, step in enumerate(steps) if step.name == "norm_qkv_rows" and step.layer == 1]
    heads = [n for n in rows if steps[n].at.part.name == "Q" and steps[n].rank == 0]
    raw = low.buffers[steps[heads[0]].raw]
    same = [n for n, buffer in enumerate(low.buffers) if replace(buffer, name=raw.name) == raw]
    for other in {steps[heads[0]].at.normed.x, *same} - {steps[heads[0]].raw}:
        wrong = list(steps)
        for number in heads:
            wrong[number] = replace(steps[number], raw=other)
        verdict = _checked(case, wrong)
        live = low.buffers[other].name in ("x0", "x1")
        assert verdict.proved is not live, (low.buffers[other].name, verdict)


@dataclass(frozen=True)
class _Overwriting(NormGateUpSwiglu):
    """Also writes to the residual, except in the first tile."""

    @property
    def writes(self) -> tuple[Region, ...]:
        other = Region(self.at.normed.x, ((0, 1), (0, 1)))
        return (*super().writes, *([other] if self.rows.start else []))


def test_values_that_only_a_later_tile_overwrites_are_lost() -> None:
    steps: Steps = list(lowered(PLAIN).instructions)
    for number, step in enumerate(steps):
        if isinstance(step, NormGateUpSwiglu):
            steps[number] = _Overwriting(**{f.name: getattr(step, f.name) for f in fields(step)})
    assert len({step.rows.start for step in steps if isinstance(step, _Overwriting)}) > 1
    (fault,) = _checked(PLAIN, steps).faults
    assert "which they also write" in fault.message


def test_no_value_is_made_from_the_buffer_that_it_overwrites() -> None:
    steps: Steps = list(lowered(PLAIN).instructions)
    places = [n for n, step in enumerate(steps) if step.name == "linear_residual"]
    last = steps[places[-1]].at
    for place in places:
        if steps[place].at is last:
            steps[place] = replace(steps[place], at=replace(last, out=last.residual))
    (fault,) = _checked(PLAIN, steps).faults
    assert "read residual from x1, which they also write" in fault.message, fault.message


def test_the_order_of_tiles_and_the_tokens_that_costs_assume_change_nothing() -> None:
    steps: Steps = list(lowered(PLAIN).instructions)
    tiles = [n for n, step in enumerate(steps) if isinstance(step, NormGateUpSwiglu)][:2]
    steps[tiles[0]], steps[tiles[1]] = steps[tiles[1]], steps[tiles[0]]
    number = next(n for n, step in enumerate(steps) if step.name == "partial_attention")
    steps[number] = replace(steps[number], at=replace(steps[number].at, planned=7))
    assert _checked(PLAIN, steps).proved


def test_a_buffer_of_weights_that_the_graph_does_not_have_is_refused() -> None:
    program = step_program(PLAIN)
    buffers = list(program.buffers)
    number = next(n for n, buffer in enumerate(buffers) if buffer.name == "l1_down_proj_weight")
    for other in ("l2_down_proj_weight", "l1_gate_up_proj_weight"):
        buffers[number] = replace(buffers[number], name=other)
        (fault,) = check_values(_graph(PLAIN), replace(program, buffers=tuple(buffers))).faults
        assert other in fault.message


def test_terms_in_16_bits_are_refused() -> None:
    program = step_program(SPLIT)
    buffers = tuple(
        replace(buffer, dtype=torch.bfloat16) if buffer.name == "attention_terms" else buffer
        for buffer in program.buffers
    )
    (fault,) = check_values(_graph(SPLIT), replace(program, buffers=buffers)).faults
    assert "adds terms that attention_terms of rank 0 stores in bf16" in fault.message, (
        fault.message
    )


@dataclass(frozen=True)
class _Shifted(Embed):
    """Executes something else than its base class, whose meaning is not its own."""

    name: ClassVar[str] = "shifted"

    def run(self, memory: Memory, probe: Probe = unseen) -> None:
        raise NotImplementedError


def test_instructions_without_a_meaning_of_their_own_are_not_proved() -> None:
    assert has_meaning(Embed) and not has_meaning(_Shifted) and not has_meaning(StepInstruction)
    steps: Steps = list(lowered(PLAIN).instructions)
    steps[0] = _Shifted(steps[0].at, steps[0].columns)
    verdict = _checked(PLAIN, steps)
    assert (verdict.proved, verdict.faults, verdict.unproved) == (False, (), ("shifted",))
    assert verdict.summary == "not proved, because these instructions have no meaning: shifted"
    assert not NOT_CHECKED.proved


@dataclass(frozen=True)
class _Reader:
    head: int
    readers: Range
    reads_head: ClassVar[tuple[str, str]] = ("head", "readers")


def test_each_reader_reads_one_head() -> None:
    assert heads_of([_Reader(1, Range(1, 3)), _Reader(0, Range(0, 1))]) == (0, 1, 1)
    with pytest.raises(ValueError, match="read heads 0 and 1 for head 1"):
        heads_of([_Reader(0, Range(0, 2)), _Reader(1, Range(1, 2))])
    with pytest.raises(ValueError, match="leave out head 1"):
        heads_of([_Reader(0, Range(0, 1)), _Reader(1, Range(2, 3))])


@pytest.mark.parametrize("place", [4, 13, 44])
def test_no_edit_that_changes_numbers_is_accepted(place: int) -> None:
    base, dice = all_bases()[place], Random(place)
    proved = set()
    for edit, _ in zip(edits(base, dice), range(12), strict=False):
        verdict = check_values(base.case.graph, edit.program)
        proved.add(verdict.proved)
        assert not (verdict.proved and changes_numbers(edit)), edit
    assert proved == {True, False}
