"""The reference machine agrees with Hugging Face eager for all presets and all lowerings."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.backends.reference.step_models import (
    APART,
    BIASED,
    DELTA_APART,
    EVEN,
    EXPERTS,
    HYBRID_EXPERTS,
    INT4_EXPERTS,
    SHARED,
    WHOLE,
    WINDOWED,
    rotated_whole,
)
from tests.backends.reference.stepping import (
    EDGES,
    STEPS,
    Case,
    eager_logits,
    schedules,
    steps_of,
    tables_of,
    texts,
    worst_error,
)
from tests.models import NEXT, TOLERANCE, relative_error
from tpcompile.backends.reference import Machine, held_back, shuffled
from tpcompile.errors import UsageError
from tpcompile.presets import PRESETS
from tpcompile.vm.groups import DeltaStep
from tpcompile.vm.program import Role
from tpcompile.vm.program.buffer import LINEAR_STATES
from tpcompile.vm.schedule.policies import POLICIES

MIXTURES = (EXPERTS, WHOLE, SHARED, HYBRID_EXPERTS, INT4_EXPERTS)
TINY = ("tiny-qwen2", "tiny-qwen3", "tiny-qwen3.5")
OFFICIAL = sorted(name for name in PRESETS if not name.startswith("tiny"))
SEVERAL_RANKS = (
    "qwen2.5-0.5b",  # 14 heads, 2 KV heads
    "qwen2.5-3b",
    "qwen2.5-7b",  # 28 heads, 4 KV heads
    "qwen3-0.6b",
    "qwen3-14b",  # 40 heads, 8 KV heads
    "qwen3-32b",
    "qwen3.5-0.8b",  # 8 heads, 2 KV heads, 16 heads of linear attention
    "qwen3.5-4b",  # 16 heads, 4 KV heads, 16 and 32 heads of linear attention
    NEXT,  # 6 heads, 2 KV heads, 3 and 6 heads of linear attention
)
FEW_STEPS = 5
"""Enough steps to cross a block boundary from any position, for sweeps over many cases."""
EDGE_STEPS = 3
"""The same from `EDGES`, which begin before, at and after a boundary."""
WAYS = list(product(POLICIES, ("heads", "rows"), (False, True), (1, 2, 3, 7)))
"""Policy, lowering, interleaved, spans. Each model gets one of the combinations."""


def _on_the_way(case: Case, number: int) -> Case:
    """Return the case lowered and scheduled one way; 7 is coprime to the number of combinations."""
    policy, lowering, interleaved, spans = WAYS[number * 7 % len(WAYS)]
    interleaved &= rotated_whole(case.model)
    return replace(case, policy=policy, lowering=lowering, interleaved=interleaved, spans=spans)


@pytest.mark.parametrize("lowering", ["heads", "rows"])
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_a_weight_each(tp: int, lowering: str) -> None:
    """Logits are those of joined weights, but for the rounding of exponentials."""
    case, joined = (Case(model, tp, lengths=(5, 1), lowering=lowering) for model in (APART, BIASED))
    actual = steps_of(case, FEW_STEPS)
    assert worst_error(case, actual) < TOLERANCE
    assert {instruction.name for instruction in case.program.instructions} >= {
        "norm_gate",
        "norm_gated_up",
    }
    for logits, wanted in zip(actual, steps_of(joined, FEW_STEPS), strict=True):
        assert relative_error(logits, wanted) < 1e-6


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_channels_and_gates_of_linear_attention_with_a_weight_each(tp: int) -> None:
    """Logits are those of joined weights, but for the rounding of products of other shapes."""
    case, joined = (Case(model, tp, lengths=(5, 1)) for model in (DELTA_APART, "tiny-qwen3.5"))
    actual = steps_of(case, FEW_STEPS)
    assert worst_error(case, actual) < TOLERANCE
    steps = [step for step in case.program.instructions if isinstance(step, DeltaStep)]
    assert all(step.at.z != step.at.projected and step.at.first_z == 0 for step in steps)
    for logits, wanted in zip(actual, steps_of(joined, FEW_STEPS), strict=True):
        assert relative_error(logits, wanted) < 1e-6


@pytest.mark.parametrize("tp", [1, 2, 3, 5])
@pytest.mark.parametrize("model", MIXTURES)
def test_experts(model: str, tp: int) -> None:
    case = _on_the_way(Case(model, tp), MIXTURES.index(model) + tp)
    assert worst_error(case, steps_of(case, EDGE_STEPS)) < TOLERANCE
    kinds = {instruction.name for instruction in case.program.instructions}
    assert kinds >= {"top_experts", "norm_experts", "expert_terms"}
    assert ("shared_terms" in kinds) == (model in (SHARED, HYBRID_EXPERTS))


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("model", [*TINY, EVEN, WINDOWED])
def test_a_cache_in_int8(model: str, tp: int) -> None:
    """Steps are those of eager with the same rounding, and not those without it."""
    number = (*TINY, EVEN, WINDOWED).index(model) * 3 + tp
    case = _on_the_way(Case(model, tp, kv="int8"), number)
    actual = steps_of(case, FEW_STEPS)
    assert worst_error(case, actual) < TOLERANCE
    assert worst_error(replace(case, kv="model"), actual) > 10 * TOLERANCE


@pytest.mark.parametrize("model", OFFICIAL)
def test_heads_of_every_preset(model: str) -> None:
    case = _on_the_way(Case(model), OFFICIAL.index(model))
    assert worst_error(case, steps_of(case, EDGE_STEPS)) < TOLERANCE


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("model", SEVERAL_RANKS)
def test_heads_on_several_ranks(model: str, tp: int) -> None:
    case = _on_the_way(Case(model, tp), SEVERAL_RANKS.index(model) * 3 + tp)
    assert worst_error(case, steps_of(case, EDGE_STEPS)) < TOLERANCE


@pytest.mark.parametrize(
    ("model", "length", "spans"),
    [
        *product(["tiny-qwen3"], EDGES, (1, 2, 3, 7)),
        *product(["tiny-qwen2", "tiny-qwen3.5"], EDGES, (3,)),
    ],
)
def test_one_sequence(model: str, length: int, spans: int) -> None:
    """The steps of all lengths together give each number of tokens up to `EDGES[-1] + STEPS`."""
    case = Case(model, lengths=(length,), spans=spans)
    steps = {EDGES[0]: EDGES[-1], EDGES[-1]: STEPS}.get(length, FEW_STEPS)
    assert worst_error(case, steps_of(case, steps)) < TOLERANCE


@pytest.mark.parametrize("lowering", ["heads", "rows"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", TINY)
def test_every_way(model: str, policy: str, lowering: str) -> None:
    """Every second one is interleaved, so that there are all pairs of two options."""
    interleaved = ([*POLICIES].index(policy) + (lowering == "rows")) % 2 > 0
    interleaved &= rotated_whole(model)
    case = Case(
        model, tp=2, spans=3, lowering=lowering, interleaved=interleaved, policy=policy, workers=4
    )
    steps = STEPS if policy == "critical-path" else FEW_STEPS  # policies only change the order
    assert worst_error(case, steps_of(case, steps)) < TOLERANCE


def test_sixteen_sequences() -> None:
    """Sixteen sequences of different lengths agree with eager."""
    case = Case("tiny-qwen3", tp=2, lengths=tuple(range(1, 32, 2)), lowering="rows")
    assert case.plan.batch == len(set(case.lengths)) == 16
    assert worst_error(case, steps_of(case, 3)) < TOLERANCE


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("model", TINY)
def test_bits_do_not_depend_on_the_schedule(model: str, tp: int) -> None:
    """The bits are independent of workers, splits, policy and execution order."""
    case = Case(model, tp, lengths=(3, 14), spans=3)
    wanted = steps_of(case, 2)
    for policy, workers, lowering in schedules((1, 5, 16)):
        other = replace(case, policy=policy, workers=workers, lowering=lowering)
        _assert_same(steps_of(other, 2, lambda step: shuffled(step)), wanted)
    for policy in ("critical-path", "dynamic"):  # queues in advance, and shared ones
        split = replace(case, policy=policy, column_splits=2)
        _assert_same(steps_of(split, 2, lambda step: shuffled(step + 7)), wanted)


@pytest.mark.parametrize("policy", POLICIES)
def test_bits_with_an_adversary(policy: str) -> None:
    """The bits are unchanged when any single instruction is delayed as long as possible."""
    case = Case("tiny-qwen3", 2, lengths=(3, 9), policy=policy, lowering="rows", workers=3)
    _assert_no_delay_matters(case)


def test_bits_with_an_adversary_of_several_blocks_per_worker() -> None:
    """A shared queue lets any worker run a claimed instruction, so the adversary may hold any."""
    case = Case("tiny-qwen3", lengths=(3, 9), policy="dynamic", workers=3, blocks_per_worker=4)
    assert len(case.program.instructions) > 2 * len(
        replace(case, blocks_per_worker=1).program.instructions
    )
    _assert_no_delay_matters(case)


def _assert_no_delay_matters(case: Case) -> None:
    wanted = steps_of(case, 1)
    for number in range(0, len(case.program.instructions), 3):
        _assert_same(steps_of(case, 1, lambda step: held_back(number)), wanted)  # noqa: B023


def _assert_same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(logits, other) for logits, other in zip(actual, expected, strict=True))


def _placed(case: Case, **changes: torch.Tensor) -> dict[str, torch.Tensor]:
    lengths = torch.tensor(case.lengths)
    rows = texts(case.model, case.lengths)
    tokens = [row[length - 1] for row, length in zip(rows, case.lengths, strict=True)]
    inputs = {"tokens": torch.stack(tokens), "lengths": lengths, "tables": tables_of(case.lengths)}
    return {**inputs, **changes}


@pytest.mark.parametrize("tp", [1, 2])
def test_many_tokens_in_one_launch(tp: int) -> None:
    """A launch of many steps returns the tokens of as many one-step launches, and of eager."""
    case = Case("tiny-qwen3", tp, policy="dynamic")
    machine, single = case.machine(), case.machine()
    for executor in (machine, single):
        executor.place(**_placed(case))
    tokens = machine.run(STEPS, shuffled(1))
    assert torch.equal(tokens, torch.cat([single.run(1) for _ in range(STEPS)]))
    first = torch.stack([row[n - 1] for n, row in zip(case.lengths, _eager(case), strict=True)])
    assert torch.equal(tokens[0].long(), first.argmax(-1))
    _assert_eager_agrees(case, tokens)


def _eager(case: Case) -> list[torch.Tensor]:
    return eager_logits(case.model, case.lengths)


def _assert_eager_agrees(case: Case, tokens: torch.Tensor) -> None:
    """Assert that each token has the largest of eager's logits after the tokens before it."""
    rows = texts(case.model, case.lengths)
    for row, length, generated in zip(rows, case.lengths, tokens.t(), strict=True):
        text = torch.cat([row[:length], generated.long()])
        with torch.inference_mode():
            logits = case.pair.eager(text[None]).logits[0, length - 1 : -1]
        chosen = logits.gather(1, generated.long()[:, None])[:, 0]
        assert bool((chosen >= logits.amax(1) - TOLERANCE * logits.abs().amax()).all())


def test_a_sequence_ends_at_a_stop() -> None:
    """Other sequences continue; the launch ends when all sequences have ended."""
    case = Case("tiny-qwen3", 2)
    free = case.machine()
    free.place(**_placed(case))
    tokens = free.run(6)
    machine = case.machine()
    machine.place(**_placed(case), stops=[int(tokens[2, 1])])
    stopped = machine.run(6)
    for generated, wanted in zip(stopped.t().tolist(), tokens.t().tolist(), strict=True):
        last = wanted.index(int(tokens[2, 1])) + 1 if int(tokens[2, 1]) in wanted else 6
        assert generated == wanted[:last] + [-1] * (len(generated) - last)
    machine.place(**_placed(case), stops=sorted(set(tokens[0].tolist())))
    assert len(machine.run(6)) == 1


def test_room_for_more_sequences_than_there_are() -> None:
    case = Case("tiny-qwen2", 2, lengths=(3, 9, 14))
    wanted = steps_of(case, 1)[0]
    machine = case.machine()
    inputs = {name: value[1:] for name, value in _placed(case).items()}
    machine.place(**inputs)
    tokens = machine.run(1)
    assert torch.equal(machine.logits[:2], wanted[1:])
    assert tokens[0, :2].tolist() == wanted[1:].argmax(-1).tolist()
    assert int(tokens[0, 2]) == -1


def test_what_runs_too_early_is_no_number() -> None:
    """An instruction that runs too early gives NaN, since scratch memory is poisoned."""
    case = Case("tiny-qwen3")
    machine = case.machine()
    machine.place(**_placed(case))
    count = len(case.program.instructions)
    machine.run(1, lambda program: iter([count - 2, *range(count - 2), count - 1]))
    assert bool(machine.logits.isnan().any())


def test_tokens_of_nobody_are_no_numbers() -> None:
    """A length that is too long by one reads a slot that was never written, which gives NaN."""
    case = Case("tiny-qwen3", lengths=(9,))
    machine = case.machine()
    placed = _placed(case)
    machine.place(**{**placed, "lengths": placed["lengths"] + 1})
    machine.run(1)
    assert bool(machine.logits.isnan().any())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": torch.tensor([65])}, "at most 64, the program's max_seq_len. Found 65"),
        ({"lengths": torch.tensor([0])}, "Lengths must be at least 1"),
        ({"tables": torch.zeros(1, 99, dtype=torch.long)}, "blocks per sequence .* Found 99"),
        ({"tokens": torch.tensor([1, 2])}, "one token, .* per row"),
    ],
)
def test_beyond_the_buffers(changes: dict[str, torch.Tensor], message: str) -> None:
    case = Case("tiny-qwen3", lengths=(9,))
    with pytest.raises(UsageError, match=message):
        case.machine().place(**_placed(case, **changes))


def test_a_batch_beyond_the_buffers() -> None:
    case, more = Case("tiny-qwen3", lengths=(9,)), Case("tiny-qwen3", lengths=(9, 9))
    with pytest.raises(
        UsageError, match=r"number of rows must be at most 1, the program's batch\. Found 2"
    ):
        case.machine().place(**_placed(more))


def test_steps_beyond_the_buffers() -> None:
    machine = Case("tiny-qwen3", lengths=(9,)).machine()
    machine.place(**_placed(Case("tiny-qwen3", lengths=(9,))))
    with pytest.raises(UsageError, match=r"steps in one launch must be at most 32, .* Found 33"):
        machine.run(33)
    with pytest.raises(UsageError, match="steps must be at least 1, got 0"):
        machine.run(0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tables": torch.tensor([[0]])}, "Sequence 0 lacks blocks for its 9 tokens"),
        ({"tables": torch.tensor([[0, 1, 999]])}, "blocks, with numbers from 0 to"),
        ({"tables": torch.tensor([[0, -1, 1]])}, "blocks, with numbers from 0 to"),
        ({"tokens": torch.tensor([5000])}, "Every token must be in the model's vocabulary"),
        ({"positions": torch.tensor([64])}, "position of a token must be at most 63, .* Found 64"),
    ],
)
def test_what_would_spoil_the_cache(changes: dict[str, torch.Tensor], message: str) -> None:
    case = Case("tiny-qwen3", lengths=(9,))
    machine = case.machine()
    before = [cache.clone() for cache in machine.memory.values(Role.CACHE)]
    with pytest.raises(UsageError, match=message):
        machine.place(**_placed(case, **changes))
    for old, cache in zip(before, machine.memory.values(Role.CACHE), strict=True):
        assert torch.equal(old.nan_to_num(7.0), cache.nan_to_num(7.0))


def test_steps_beyond_the_blocks() -> None:
    """A launch that exceeds the blocks of a sequence is refused before its first step."""
    case = Case("tiny-qwen3", lengths=(9,))
    machine = case.machine()
    machine.place(**_placed(case, tables=tables_of(case.lengths)[:, :3]))
    assert len(machine.run(4)) == 4
    with pytest.raises(UsageError, match="lacks blocks for its 13 tokens"):
        machine.run(1)
    machine.place(**_placed(case, tables=tables_of(case.lengths)[:, :3]))
    with pytest.raises(UsageError, match="lacks blocks for its 13 tokens"):
        machine.run(5)


def test_a_sequence_that_has_ended_before() -> None:
    case = Case("tiny-qwen3", lengths=(9, 4))
    machine = case.machine()
    machine.place(**_placed(case))
    alone = machine.run(3)[:, 1]
    machine.place(**_placed(case), ended=torch.tensor([True, False]))
    assert machine.run(3).tolist() == [[-1, token] for token in alone.tolist()]
    machine.place(**_placed(case), ended=torch.tensor([True, True]))
    assert len(machine.run(3)) <= 1, "all sequences have ended"


def test_a_sequence_that_has_ended_needs_no_room() -> None:
    case = Case("tiny-qwen3", lengths=(9,))
    machine = case.machine()
    machine.place(**_placed(case))
    stop = int(machine.run(1)[0])
    machine.place(**_placed(case, tables=tables_of(case.lengths)[:, :3]), stops=[stop])
    machine.run(1)
    assert len(machine.run(32)) == 0


LINEAR = Case("tiny-qwen3.5", 2, lengths=(9, 4))
"""Two sequences of a model with linear attention, which has four states on each rank."""


@pytest.mark.parametrize(
    ("read", "write", "message"),
    [
        ([0, 4], [0, 1], "must read one state.*numbers from 0 to 3"),
        ([0, 1], [0, -1], "must write one state.*numbers from 0 to 3"),
        ([0], [0, 1], "must read one state.*for 2 rows"),
        ([0, 1], [2, 2], "Sequence 0 must not write the state of sequence 1"),
        ([0, 1], [2, 0], "Sequence 1 must not write the state of sequence 0"),
    ],
)
def test_states_that_would_spoil_others(read: list[int], write: list[int], message: str) -> None:
    machine = LINEAR.machine()
    with pytest.raises(UsageError, match=message):
        machine.place(**_placed(LINEAR), read=torch.tensor(read), write=torch.tensor(write))


def test_a_new_sequence_reads_no_state() -> None:
    """It may be said to read any state, also one that another sequence writes."""
    case = replace(LINEAR, lengths=(1, 1))
    machine, other = case.machine(), case.machine()
    machine.place(**_placed(case), read=torch.tensor([0, 0]), write=torch.tensor([0, 1]))
    other.place(**_placed(case), read=torch.tensor([2, 3]), write=torch.tensor([0, 1]))
    assert torch.equal(machine.run(4), other.run(4))


def test_a_launch_reads_one_state_and_writes_another() -> None:
    """What is read stays as it was; later steps resume from what the step before has written."""
    machine, other = LINEAR.machine(), LINEAR.machine()
    machine.place(**_placed(LINEAR), read=torch.tensor([0, 1]), write=torch.tensor([3, 2]))
    other.place(**_placed(LINEAR))
    before = [held.clone() for role in LINEAR_STATES for held in machine.memory.values(role)]
    assert torch.equal(machine.run(4), other.run(4))
    assert torch.equal(machine.memory.logits, other.memory.logits)
    after = [held for role in LINEAR_STATES for held in machine.memory.values(role)]
    in_place = [held for role in LINEAR_STATES for held in other.memory.values(role)]
    for was, now, expected in zip(before, after, in_place, strict=True):
        assert torch.equal(was[:, :2], now[:, :2])
        assert torch.equal(now[:, [3, 2]], expected[:, :2])


def test_two_sequences_resume_from_one_state() -> None:
    case = replace(LINEAR, lengths=(9, 9))
    machine = case.machine()
    tables = tables_of(case.lengths)
    tables[1, :2] = tables[0, :2]  # the blocks of the past
    placed = _placed(case, tables=tables)
    placed["tokens"] = placed["tokens"][:1].repeat(2)
    machine.place(**placed, read=torch.tensor([0, 0]), write=torch.tensor([2, 1]))
    first, second = machine.run(4).T
    assert torch.equal(first, second)


def test_new_tokens_need_slots_of_their_own() -> None:
    """Sequences may share blocks of past tokens, but not slots that a launch writes."""
    case = Case("tiny-qwen3", lengths=(9, 9))
    machine, tables = case.machine(), tables_of(case.lengths)
    shared = tables.clone()
    shared[1, :2] = tables[0, :2]
    machine.place(**_placed(case, tables=shared))
    for column in (2, 1):
        wrong = tables.clone()
        wrong[1, column] = tables[0, 2]
        with pytest.raises(
            UsageError, match=r"Sequences \d and \d must not share the slots of new"
        ):
            machine.place(**_placed(case, tables=wrong))
    later = tables_of(case.lengths)
    later[1, 3] = later[0, 0]
    machine.place(**_placed(case, tables=later))
    machine.run(4)
    machine.place(**_placed(case, tables=later))
    with pytest.raises(UsageError, match="Sequences 1 and 0 must not share the slots of new"):
        machine.run(5)


def test_a_program_that_does_not_repeat_runs_one_step() -> None:
    case = Case("tiny-qwen3", lengths=(9,))
    memory = case.memory()
    memory.program = replace(memory.program, repeats=False)
    machine = Machine(memory)
    machine.place(**_placed(case))
    assert len(machine.run(1)) == 1
    with pytest.raises(UsageError, match=r"one step per launch.*Found 2 steps"):
        machine.run(2)
