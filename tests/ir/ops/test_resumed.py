"""Linear attention that resumes from states equals that over the whole history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ir.ops.test_delta import TOLERANCE, operands
from tests.ir.ranks import Operand, operand, random, refused, run
from tests.ir.strategies import EXAMPLES
from tests.models import relative_error
from tpcompile.ir.layout import FusedLayout, Layout, even_runs
from tpcompile.ir.ops import CAUSAL_CONV, GATED_DELTA_RULE, RESUMED_CONV, RESUMED_DELTA_RULE
from tpcompile.ir.ops.resumed import STATE_HEADS, TAIL_CHANNELS
from tpcompile.ir.plan import LINEAR_HEADS, plan_heads
from tpcompile.ir.roles import CacheOf, StatesOf

LAYERS, LAYER, COUNT, TAPS, CHANNELS = 2, 1, 9, 4, 6
WEIGHT, BIAS = random(CHANNELS, 1, TAPS, seed=1).whole, random(CHANNELS, seed=2).whole


class Kept:
    """Growing sequences and their states, as a model would use them."""

    def __init__(self, free: Sequence[int]) -> None:
        self.free = list(free)
        self.held: list[int] = []
        self.histories: list[list[torch.Tensor]] = []
        self.tails = torch.full((LAYERS, COUNT, TAPS - 1, CHANNELS), torch.nan)
        self.states = torch.full((LAYERS, COUNT, 4, 16, 8), torch.nan)
        self._drawn = 0

    def step(self, new: Sequence[int]) -> list[torch.Tensor]:
        """Append new tokens to each sequence; return the results of both ops."""
        while len(self.histories) < len(new):
            self.histories.append([tensor[:0] for tensor in self._draw(1)])
            self.held.append(self.free.pop(0))
        fresh = [self._draw(count) for count in new]
        for row, values in enumerate(fresh):
            grown = zip(self.histories[row], values, strict=True)
            self.histories[row] = [torch.cat(pair) for pair in grown]
        pairs = list(zip(new, self.held, strict=True))
        write = [self.free.pop(0) if count else old for count, old in pairs]
        x, *packed = (torch.cat(side) for side in zip(*fresh, strict=True))
        lengths = torch.tensor([len(history[0]) for history in self.histories])
        starts = torch.tensor([0, *new]).cumsum(0)
        resumed = (starts, lengths, torch.tensor(self.held), torch.tensor(write), LAYER)
        outputs = [
            RESUMED_CONV(x, WEIGHT, BIAS, self.tails, *resumed),
            RESUMED_DELTA_RULE(*packed, self.states, *resumed),
        ]
        self.free += [old for count, old in pairs if count]
        self.held = write
        return outputs

    def expected(self, new: Sequence[int]) -> list[torch.Tensor]:
        """Return the rows of the new tokens, from the whole histories."""
        rows: list[list[torch.Tensor]] = [[], []]
        for count, (x, *packed) in zip(new, self.histories, strict=True):
            starts = torch.tensor([0, len(x)])
            rows[0].append(CAUSAL_CONV(x, WEIGHT, BIAS, starts, 0)[len(x) - count :])
            rows[1].append(GATED_DELTA_RULE(*packed, starts, 0)[len(x) - count :])
        return [torch.cat(side) for side in rows]

    def _draw(self, count: int) -> list[torch.Tensor]:
        self._drawn += 1
        return [random(count, CHANNELS, seed=self._drawn).whole, *operands(count)]


@EXAMPLES
@given(st.data())
def test_any_history(data: st.DataObject) -> None:
    """A step may mix prompts, single tokens, chunks and idle sequences, in any states amid NaN."""
    model = Kept(data.draw(st.permutations(range(1, COUNT))))
    sequences = data.draw(st.integers(1, 3))
    counts = st.sampled_from((0, 1, 2, 3, 5, 64, 70))
    new = st.lists(counts, min_size=sequences, max_size=sequences).filter(any)
    for step in data.draw(st.lists(new, min_size=1, max_size=4)):
        for output, expected in zip(model.step(step), model.expected(step), strict=True):
            assert relative_error(output, expected) < TOLERANCE


def test_pieces_of_whole_chunks_have_the_same_bits() -> None:
    model = Kept(range(1, COUNT))
    parts = [model.step([count]) for count in (64, 128, 9)]
    for pieces, expected in zip(zip(*parts, strict=True), model.expected([201]), strict=True):
        assert torch.equal(torch.cat(pieces), expected)


def test_the_state_that_is_read_keeps_its_bits() -> None:
    """Only the written state changes, and only in its layer: states can be shared."""
    model = Kept([7, 8, 3, 5, 2])
    model.step([5, 2])
    before = model.tails.clone(), model.states.clone()
    model.step([1, 0])
    for old, new in zip(before, (model.tails, model.states), strict=True):
        changed = [
            (layer, state)
            for layer in range(LAYERS)
            for state in range(COUNT)
            if not torch.equal(old[layer, state].nan_to_num(), new[layer, state].nan_to_num())
        ]
        assert changed == [(LAYER, 2)]
        assert bool(new[0].isnan().all())


def test_a_state_may_be_written_in_place_or_continued_twice() -> None:
    for write in ([4, 6], [4, 2]):
        model = Kept([7, 2])
        model.step([70])
        x, *packed = model._draw(2)
        starts, lengths = torch.tensor([0, 1, 2]), torch.tensor([71, 71])
        resumed = (starts, lengths, torch.tensor([2, 2]), torch.tensor(write), LAYER)
        outputs = [
            RESUMED_CONV(x, WEIGHT, BIAS, model.tails.clone(), *resumed),
            RESUMED_DELTA_RULE(*packed, model.states.clone(), *resumed),
        ]
        histories = [torch.cat(pair) for pair in zip(model.histories[0], (x, *packed), strict=True)]
        for row in range(2):
            inputs = [history[[*range(70), 70 + row]] for history in histories]
            expected = GATED_DELTA_RULE(*inputs[1:], torch.tensor([0, 71]), 0)[70:]
            assert relative_error(outputs[1][row : row + 1], expected) < TOLERANCE
            expected = CAUSAL_CONV(inputs[0], WEIGHT, BIAS, torch.tensor([0, 71]), 0)[70:]
            assert torch.equal(outputs[0][row : row + 1], expected)


def test_a_new_sequence_reads_no_state() -> None:
    """The first step starts from zero, though a state's old content is NaN."""
    model = Kept([7, 1])
    outputs, expected = model.step([3]), model.expected([3])
    assert all(
        torch.equal(output, wanted) for output, wanted in zip(outputs, expected, strict=True)
    )
    again = Kept([7, 1])
    assert all(len(output) == 0 for output in again.step([0]))
    assert bool(again.states.isnan().all()) and bool(again.tails.isnan().all())


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_fewer_tokens_than_taps_leave_zeros_in_the_tail(tokens: int) -> None:
    model = Kept([7, 1])
    model.step([tokens])
    tail = model.tails[LAYER, 1]
    x = model.histories[0][0]
    assert torch.equal(tail, torch.cat([x.new_zeros(3, CHANNELS), x])[-3:])


# Types.

HEADS = plan_heads(6, 3, 2, LINEAR_HEADS)
FUSED = FusedLayout((HEADS.keys.with_grain(2), HEADS.keys.with_grain(2), HEADS.queries))
RESUMED = {
    "starts": operand(torch.tensor([0, 3, 5])),
    "lengths": operand(torch.tensor([3, 5])),
    "read": operand(torch.tensor([0, 2])),
    "write": operand(torch.tensor([1, 3])),
    "layer": 1,
}


def conv_operands(**changes: Any) -> dict[str, Any]:
    return {
        "x": random(5, 18).sharded(1, FUSED),
        "weight": random(18, 1, 4, seed=1).sharded(0, FUSED),
        "bias": None,
        "tails": random(2, 4, 3, 18, seed=2).sharded(TAIL_CHANNELS, FUSED).in_role(StatesOf()),
        **RESUMED,
        **changes,
    }


def delta_operands(**changes: Any) -> dict[str, Any]:
    names = ("q", "k", "v", "decay", "beta")
    by_name: dict[str, Any] = dict(zip(names, map(operand, operands(5, 3, 6)), strict=True))
    for name in names:
        by_name[name] = by_name[name].sharded(1, HEADS.keys if name in "qk" else HEADS.queries)
    states = random(2, 4, 6, 16, 8, seed=2).sharded(STATE_HEADS, HEADS.queries)
    return {**by_name, "states": states.in_role(StatesOf()), **RESUMED, **changes}


def test_states_on_ranks() -> None:
    run(RESUMED_CONV, **conv_operands(), ranks=2).assert_sound()
    run(RESUMED_DELTA_RULE, **delta_operands(), ranks=2).assert_sound(exact=True)


def _refused(rule: str, **changes: Any) -> None:
    """Assert that both ops refuse operands which they have in common."""
    refused(rule, RESUMED_CONV, **conv_operands(**changes))
    refused(rule, RESUMED_DELTA_RULE, **delta_operands(**changes))


def test_refuses_states_of_another_shape_dtype_or_role() -> None:
    tails, states = conv_operands()["tails"], delta_operands()["states"]
    for wrong in (
        tails.in_role(None),
        tails.in_role(CacheOf(2)),
        random(2, 4, 4, 18).sharded(3, FUSED).in_role(StatesOf()),
        operand(tails.whole.bfloat16()).sharded(3, FUSED).in_role(StatesOf()),
    ):
        refused("states", RESUMED_CONV, **conv_operands(tails=wrong))
    for wrong in (
        states.in_role(None),
        random(2, 4, 6, 8, 16).sharded(2, HEADS.queries).in_role(StatesOf()),
        operand(states.whole.bfloat16()).sharded(2, HEADS.queries).in_role(StatesOf()),
    ):
        refused("states", RESUMED_DELTA_RULE, **delta_operands(states=wrong))


def test_refuses_states_of_other_heads_or_channels() -> None:
    runs = Layout("channels", 18, 1, even_runs(18, 2))
    turned = Layout("linear_v_heads", 6, 1, tuple(reversed(HEADS.queries.parts)))
    whole = random(2, 4, 3, 18).in_role(StatesOf())
    for wrong in (whole, whole.sharded(TAIL_CHANNELS, runs)):
        error = refused("states", RESUMED_CONV, **conv_operands(tails=wrong))
        assert "the rank's own channels" in str(error)
    whole = random(2, 4, 6, 16, 8).in_role(StatesOf())
    for wrong in (whole, whole.sharded(STATE_HEADS, turned)):
        error = refused("states", RESUMED_DELTA_RULE, **delta_operands(states=wrong))
        assert "the rank's own heads" in str(error)


@pytest.mark.parametrize("layer", [-1, 2])
def test_refuses_a_layer_without_states(layer: int) -> None:
    _refused("states", layer=layer)


@pytest.mark.parametrize("name", ["lengths", "read", "write"])
def test_refuses_other_numbers_of_sequences(name: str) -> None:
    ok: Operand = RESUMED[name]  # type: ignore[assignment]
    rows = Layout("rows", 2, 1, even_runs(2, 2))
    for wrong in (
        operand(ok.whole.int()),
        operand(ok.whole[:1]),
        operand(ok.whole[:, None]),
        ok.sharded(0, rows),
        ok.partial(),
    ):
        _refused("states", **{name: wrong})


def test_refuses_operands_in_a_role() -> None:
    for name in ("starts", "lengths", "read", "write"):
        wrong: Operand = RESUMED[name]  # type: ignore[assignment]
        _refused("head-order", **{name: wrong.in_role(StatesOf())})
    refused("head-order", RESUMED_CONV, **conv_operands(x=random(5, 18).in_role(StatesOf())))
    refused(
        "head-order", RESUMED_DELTA_RULE, **delta_operands(v=random(5, 6, 8).in_role(StatesOf()))
    )


def test_refuses_what_the_whole_ops_refuse() -> None:
    refused("causal-conv", RESUMED_CONV, **conv_operands(weight=random(18, 1, 4)))
    refused("delta-rule", RESUMED_DELTA_RULE, **delta_operands(beta=random(5, 6)))
    turned = Layout("linear_k_heads", 3, 1, tuple(reversed(HEADS.keys.parts)))
    wrong = {name: delta_operands()[name].sharded(1, turned) for name in "qk"}
    refused("linear-k-heads", RESUMED_DELTA_RULE, **delta_operands(**wrong))
