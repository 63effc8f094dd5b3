"""Correct programs agree with eager and with the torch module, group by group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import fx

from tests.backends.reference.step_models import SHARED, pair_named
from tests.compare.program.cases import (
    BLOCK,
    QWEN2,
    QWEN3,
    SPANS,
    case_of,
    in_order,
    lowered_of,
    tiny,
)
from tests.compare.program.mistakes import eps
from tests.compare.program.wrong import (
    Mistaken,
    Spoilt,
    anywhere,
    instructions,
    of,
    operands,
)
from tests.runtime.eager_pair import lively
from tpcompile.compare.comparison import Comparison
from tpcompile.compare.group_rows import GroupRow
from tpcompile.compare.program import Batch, compare_program, plan_for, prepare
from tpcompile.errors import UnsupportedError, UsageError
from tpcompile.ir.ops import (
    ATTENTION,
    NORM_GATE_UP_SWIGLU,
    NORM_QKV_ROPE_APPEND,
    PARTIAL_ATTENTION,
    SPECS,
)
from tpcompile.passes import Report
from tpcompile.passes.pipeline import decode_pipeline, parse_pipeline
from tpcompile.rewriting.rewrite import calls
from tpcompile.vm.groups import (
    AttentionReduce,
    NormGateUpSwiglu,
    NormLmHead,
    NormQkvRopeAppend,
    PartialAttention,
    TopExperts,
)
from tpcompile.vm.groups.qkv_operands import Part
from tpcompile.vm.lowering import lower
from tpcompile.vm.program.instruction import Memory, Probe, unseen

PROJECTED = ["norm", "q", "k", "v", "q_normed", "k_normed", "q_rotated", "k_rotated"]
ATTENDED = ["k_cached", "v_cached", "partial_lse", "partial_values", "attention"]
LAYER = [*PROJECTED, *ATTENDED, "attention_residual", "mlp_norm", "swiglu", "mlp_residual"]
CONVOLVED = ["norm", "projected", "gates", "tail", "q_conv", "k_conv", "v_conv"]
LINEAR = [*CONVOLVED, "decay", "beta", "state", "delta_rule", "mixed", *LAYER[-4:]]
GATED = [*LAYER[:4], "attention_gate", *LAYER[4:12], "ungated", *LAYER[12:]]
ENDS = ["final_norm", "logits", "token"]
LENGTHS = (9, 17, 1)


def compared(model: Any, tp: int, steps: int = 1, spans: int = SPANS, **options: Any) -> Comparison:
    passes = decode_pipeline(tp, spans, BLOCK, options.pop("interleaved", False))
    seed = {"random_weights": 0} if isinstance(model, str) else {}
    return compare_program(model, passes, Batch(LENGTHS, steps), **{**seed, **options})


def groups_of(comparison: Comparison, side: str) -> list[tuple[str, int | None]]:
    rows = [row for row in comparison.rows if isinstance(row, GroupRow)]
    return [(row.node, row.layer) for row in rows if row.side == side]


def test_all_sides_have_the_same_groups_once() -> None:
    comparison = compared(QWEN3, 3)
    names = [("embedding", None)]
    names += [(name, layer) for layer in (0, 1) for name in LAYER]
    names += [(name, None) for name in ENDS]
    assert groups_of(comparison, "torch module") == groups_of(comparison, "program") == names
    assert comparison.ok, comparison.table()
    assert list(comparison.top5) == ["eager", "torch module", "program"]
    assert max(row.rel for row in comparison.rows) < 1e-5


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_linear_attention_has_groups_of_its_own(tp: int) -> None:
    comparison = compared(tiny("qwen3.5", full_attention_interval=2), tp, 2)
    names = [("embedding", None)]
    for layer in range(4):
        names += [(name, layer) for name in (GATED if layer % 2 else LINEAR)]
    names += [(name, None) for name in ENDS]
    assert groups_of(comparison, "torch module") == groups_of(comparison, "program") == 2 * names
    assert comparison.ok, comparison.table()
    assert max(row.rel for row in comparison.rows) < 1e-5


@pytest.mark.parametrize("tp", [1, 2])
def test_routers_have_groups_of_their_own(tp: int) -> None:
    """Logits, choices and scores; the second half of a layer has those of its shared expert."""
    comparison = compared(pair_named(SHARED).eager, tp)
    half = ["attention_residual", "mlp_norm", "router", "choice"]
    half += ["scores", "swiglu", "shared_gate"]
    names = {name for name, _ in groups_of(comparison, "program")}
    assert names >= {*half, "mlp_residual"}
    assert groups_of(comparison, "torch module") == groups_of(comparison, "program")
    assert comparison.ok, comparison.table()
    assert max(row.rel for row in comparison.rows) < 1e-5


def test_another_choice_is_found_at_the_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router's logits are right, and its choice is not."""
    monkeypatch.setattr(TopExperts, "run", _least_experts)
    first = compared(pair_named(SHARED).eager, 2).first_divergence
    assert isinstance(first, GroupRow) and (first.node, first.layer) == ("choice", 0)


def _least_experts(instruction: TopExperts, memory: Memory, probe: Probe = unseen) -> None:
    shared, row = instruction.at, instruction.sequence
    shares = memory[shared.logits][row].softmax(-1)
    least = shares.topk(shared.chosen, largest=False)
    memory[shared.scores][row], memory[shared.ids][row] = least.values, least.indices.int()


def test_heads_that_are_not_normed_have_no_such_group() -> None:
    names = {name for name, _ in groups_of(compared(QWEN2, 2), "program")}
    assert not names & {"q_normed", "k_normed"}
    assert {"q", "q_rotated"} <= names


@pytest.mark.parametrize("lowering", ["heads", "rows"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("model", "tp", "spans"), [(QWEN2, 1, 3), (QWEN3, 4, 1)])
def test_programs_agree_step_by_step(
    model: str, tp: int, spans: int, interleaved: bool, lowering: str
) -> None:
    options = {"interleaved": interleaved, "lowering": lowering, "workers": 3}
    comparison = compared(model, tp, 3, spans, **options)
    assert comparison.ok, comparison.table()
    assert {row.step for row in comparison.rows if isinstance(row, GroupRow)} == {1, 2, 3}


@pytest.mark.parametrize("setting", ["eager", "sdpa"])
def test_layers_that_see_a_window(setting: str) -> None:
    """Layers with a sliding window agree, and the model's attention setting is restored."""
    changes = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    model = tiny("qwen2", **changes)
    model.set_attn_implementation(setting)
    comparison = compared(model, 2, 3, 3)
    assert comparison.ok, comparison.table()
    assert model.config._attn_implementation == setting


@pytest.mark.parametrize("model", ["tiny-qwen2", "tiny-qwen3", "tiny-qwen3.5"])
def test_rounding_is_no_divergence(model: str) -> None:
    """Rounding in bf16 is not reported, although these weights amplify it beyond the tolerances."""
    comparison = compared(lively(model).to(torch.bfloat16), 3, 2)
    assert comparison.ok, comparison.table()
    assert max(row.rel for row in comparison.rows) > 1e-2
    assert all(row.beside_fp32 for row in comparison.rows if row.node != "token")


def test_a_mistake_in_bf16_is_found() -> None:
    """A scale that is wrong by a quarter is detected in bf16."""
    passes = decode_pipeline(2, SPANS, BLOCK)
    case = prepare(lively("tiny-qwen3").to(torch.bfloat16), passes, Batch(LENGTHS))
    right = lower(case.graph, plan_for(case, 3))
    _, lowered = operands(PartialAttention, scale=lambda current: 1.25 * current.scale)(
        (case, right)
    )
    assert case.against(in_order(right)).ok
    first = case.against(in_order(lowered)).first_divergence
    assert first is not None
    assert (first.node, first.layer) == ("partial_lse", 1)


def test_a_tolerance_takes_the_place_of_fp32() -> None:
    comparison = compared(QWEN3, 1, dtype=torch.bfloat16, tolerance=0.0)
    assert comparison.ok == all(row.ok for row in comparison.rows)
    assert all(row.ok == (row.rel == 0) for row in comparison.rows if row.node != "token")
    assert not any(row.beside_fp32 for row in comparison.rows)


def right() -> Spoilt:
    """Return the correct program that mistakes are injected into."""
    return case_of(QWEN3, 3), lowered_of(QWEN3, 3)


def test_one_wrong_instruction_is_named() -> None:
    """A single wrong attention instruction is named, with its sequence, KV head and spans."""

    mistake = operands(
        PartialAttention,
        lambda instruction: (instruction.rank, instruction.sequences.start) == (2, 1),
        scale=1.0,
    )
    case, lowered = mistake(right())
    first = case.against(in_order(lowered)).first_divergence
    assert isinstance(first, GroupRow)
    assert (first.node, first.layer) == ("partial_lse", 1)
    assert (first.sequences, first.heads, first.spans) == ((1,), (4, 5), (0, 1))
    assert first.ranks == (2,)
    assert first.by == (
        "partial_attention layer 1 rank 2 sequences=1:2 kv_head=0 heads=0:2 span=0:2",
    )


def test_one_of_many_norms_that_is_wrong_is_named() -> None:
    """If a single instruction computes another norm than the others, it is named."""

    mistake = operands(
        NormGateUpSwiglu,
        lambda instruction: (instruction.rank, instruction.rows.start) == (1, 0),
        normed=eps(1e-3),
    )
    case, lowered = mistake(right())
    first = case.against(in_order(lowered)).first_divergence
    assert first is not None
    assert (first.node, first.layer) == ("mlp_norm", 1)
    message = "reported with different bits: norm_gate_up_swiglu layer 1 rank"
    assert first.problem.startswith(message)


DOUBLED = [
    (NormQkvRopeAppend, of(Part.Q), "q", 1),
    (NormQkvRopeAppend, of(Part.K), "k", 1),
    (NormQkvRopeAppend, of(Part.V), "v", 1),
    (PartialAttention, anywhere, "partial_lse", 1),
    (AttentionReduce, anywhere, "attention", 1),
    (NormGateUpSwiglu, anywhere, "swiglu", 1),
    (NormLmHead, anywhere, "logits", None),
]


@pytest.mark.parametrize(("kind", "which", "node", "layer"), DOUBLED)
def test_an_instruction_that_is_there_twice_is_named(
    kind: Any, which: Any, node: str, layer: int | None
) -> None:
    """A duplicated instruction is reported, although its values are bitwise equal."""
    case, lowered = case_of(QWEN3, 2), lowered_of(QWEN3, 2)
    candidates = [
        instruction
        for instruction in lowered.instructions
        if isinstance(instruction, kind) and which(instruction)
    ]
    again = next(
        instruction
        for instruction in candidates
        if instruction.layer in (1, -1) and instruction.rank == 1
    )
    place = lowered.instructions.index(again)
    doubled = (*lowered.instructions[:place], again, *lowered.instructions[place:])
    program = in_order(replace(lowered, instructions=doubled))
    first = case.against(program).first_divergence
    assert isinstance(first, GroupRow)
    assert (first.side, first.node, first.layer) == ("program", node, layer)
    assert first.problem == f"reported twice by one rank: {again.label}; {again.label}"
    assert first.max_abs < 1e-4


class Quiet(Mistaken):
    """Instruction that reports no values."""

    def run(self, memory: Any, probe: Any = None) -> None:
        self.one.run(memory)


class Talkative(Mistaken):
    """Instruction that reports a value that no other side has."""

    def run(self, memory: Any, probe: Any = None) -> None:
        self.one.run(memory, lambda name, *args: (probe(name, *args), probe("extra", *args)))


@pytest.mark.parametrize(
    ("change", "node", "problem"),
    [(Quiet, "mlp_norm", "missing on rank 0"), (Talkative, "extra", "no other side has it")],
)
def test_what_is_missing_or_too_much_is_a_divergence(change: Any, node: str, problem: str) -> None:
    mistaken = instructions(NormGateUpSwiglu, change, lambda instruction: instruction.rank == 0)
    case, lowered = mistaken(right())
    first = case.against(in_order(lowered)).first_divergence
    assert first is not None
    assert (first.node, first.layer) == (node, 1)
    assert first.problem.startswith(problem)


def test_what_is_no_token_is_none_that_is_the_same() -> None:
    case, lowered = operands(NormLmHead, first=2000)(right())
    comparison = case.against(in_order(lowered))
    assert not comparison.tokens_equal
    assert comparison.first_divergence is not None
    assert comparison.first_divergence.problem.startswith("invalid tokens")


@dataclass(frozen=True)
class WrongPass:
    """Pass that changes an argument of an op in layer 1, and leaves a valid graph."""

    target: Any
    argument: str
    value: Any
    name: ClassVar[str] = "wrong"

    def apply(self, gm: fx.GraphModule) -> Report:
        place = SPECS[self.target].argument_names.index(self.argument)
        calls(gm, self.target)[1].update_arg(place, self.value)
        return Report(matches=1)


@pytest.mark.parametrize(
    ("behind", "current", "side", "group"),
    [
        ("kv-heads", WrongPass(ATTENTION, "scale", 1.0), "torch module", "partial_lse"),
        ("fuse-norm-qkv", WrongPass(NORM_QKV_ROPE_APPEND, "head_eps", 1e-3), "program", "q_normed"),
        ("fuse-norm-gate-up", WrongPass(NORM_GATE_UP_SWIGLU, "eps", 1e-3), "program", "mlp_norm"),
        ("split-attention", WrongPass(PARTIAL_ATTENTION, "scale", 1.0), "program", "partial_lse"),
    ],
)
def test_a_wrong_pass_is_found_on_the_first_side_that_it_spoils(
    behind: str, current: WrongPass, side: str, group: str
) -> None:
    passes = decode_pipeline(2, SPANS, BLOCK)
    place = [known.name for known in passes].index(behind) + 1
    passes.insert(place, current)
    first = compare_program(QWEN3, passes, Batch((9, 6)), random_weights=0).first_divergence
    assert isinstance(first, GroupRow)
    assert (first.side, first.node, first.layer) == (side, group, 1)


@pytest.mark.parametrize("pipeline", ["canonicalize", "standard"])
def test_a_pipeline_that_makes_no_program_is_refused(pipeline: str) -> None:
    with pytest.raises(UsageError, match="does not produce a program"):
        prepare(QWEN3, parse_pipeline(pipeline), Batch(), random_weights=0)


def test_no_sequences_are_refused() -> None:
    with pytest.raises(UsageError, match=r"empty.*at least one token"):
        prepare(QWEN3, decode_pipeline(1), Batch(()), random_weights=0)


def test_a_graph_without_a_token_is_refused() -> None:
    passes = [current for current in decode_pipeline(1, 2, 4) if current.name != "greedy-head"]
    with pytest.raises(UnsupportedError, match="greedy-head"):
        prepare(QWEN3, passes, Batch(), random_weights=0)


def test_sequences_with_fewer_blocks_than_spans() -> None:
    passes = decode_pipeline(2, 3, BLOCK)
    comparison = compare_program(QWEN3, passes, Batch((1,)), random_weights=0)
    assert comparison.ok, comparison.table()


@pytest.mark.parametrize("batch", [Batch((9, 513)), Batch((9,), steps=505)])
def test_no_more_tokens_than_positions(batch: Batch) -> None:
    message = (
        r"513 tokens, including those of all steps\. Expected at most 512, the max_position_emb"
    )
    with pytest.raises(UsageError, match=message):
        prepare(QWEN3, decode_pipeline(1, SPANS, BLOCK), batch, random_weights=0)
