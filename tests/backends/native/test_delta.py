"""Linear attention and gates of many tokens: kernels equal torch's, and cuts change no bit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.backends.native.many_tokens import NEEDS, TOKENS, near, random
from tpcompile.backends.native import delta, functions
from tpcompile.backends.torch_tp import functions as torchs

pytestmark = NEEDS
STATES, LAYERS, LAYER = 9, 3, 1


class Tokens:
    """New tokens of sequences, each with its tokens before them, and its states in random places.

    A new sequence reads a state that does not exist. A sequence may write the state that it reads.
    """

    def __init__(self, sizes: Sequence[tuple[int, int]]) -> None:
        before, new = zip(*sizes, strict=True)
        self.starts = torch.tensor([0, *new]).cumsum(0)
        self.lengths = torch.tensor(before) + torch.tensor(new)
        places = torch.randperm(STATES)
        self.read = torch.where(torch.tensor(before) > 0, places[: len(sizes)], 99)
        in_place = torch.arange(len(sizes)) % 2 > 0
        free = places[len(sizes) : 2 * len(sizes)]
        self.write = torch.where(in_place & (self.read < STATES), self.read, free)

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.starts, self.lengths, self.read, self.write


SIZES = [[(0, 1)], [(3, 1), (0, 70)], [(0, 2), (5, 0), (64, 65), (1, 3)]]


def convolved(tokens: Tokens, how: Any, x: Any, weight: Any, bias: Any, tails: Any) -> Any:
    """Return the result, and the tails that it leaves."""
    left = tails.clone()
    return how.resumed_conv(x, weight, bias, left, *tokens.arguments, LAYER), left


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("channels", [20, 256, 700])
@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_convolutions(sizes: list[tuple[int, int]], channels: int, taps: int, biased: bool) -> None:
    tokens = Tokens(sizes)
    x = random(len(tokens), channels + 24)[:, 8 : channels + 8]
    weight, bias = random(channels, 1, taps), random(channels) if biased else None
    tails = random(LAYERS, STATES, taps - 1, channels)
    assert delta.takes_channels(x, weight, bias, tails)
    (actual, actual_tails), (expected, expected_tails) = (
        convolved(tokens, how, x, weight, bias, tails) for how in (functions, torchs)
    )
    near(actual, expected)
    assert torch.equal(actual_tails, expected_tails)


def ruled(tokens: Tokens, how: Any, inputs: Sequence[Any], states: Any, heads: Any = None) -> Any:
    """Return the result, and the states that it leaves."""
    left = states.clone()
    return how.resumed_delta_rule(*inputs, left, *tokens.arguments, LAYER, heads), left


def inputs_of(tokens: int, shape: tuple[int, int, int, int]) -> tuple[list[Any], torch.Tensor]:
    """Return the inputs of a delta rule of these key and value heads and widths, and states."""
    keys, values, wide, width = shape
    q, k, v = random(tokens, 2 * keys * wide + values * width).split(
        (keys * wide, keys * wide, values * width), 1
    )
    decay = -torch.rand(tokens, values)
    states = torch.randn(LAYERS, STATES, values, wide, width)
    heads = [tensor.unflatten(1, (-1, last)) for tensor, last in ((q, wide), (k, wide), (v, width))]
    return [*heads, decay, torch.rand(tokens, values).bfloat16()], states


SHAPES = [(1, 1, 16, 16), (2, 4, 24, 48), (2, 2, 128, 128)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("shape", SHAPES)
def test_delta_rules(sizes: list[tuple[int, int]], shape: tuple[int, int, int, int]) -> None:
    tokens = Tokens(sizes)
    inputs, states = inputs_of(len(tokens), shape)
    assert delta.takes_heads(*inputs[:3], states)
    (actual, actual_states), (expected, expected_states) = (
        ruled(tokens, how, inputs, states) for how in (functions, torchs)
    )
    near(actual, expected)
    assert bool(
        ((actual_states - expected_states).abs() <= 1e-5 * expected_states.abs().max()).all()
    )
    written = tokens.write[tokens.starts.diff() > 0]
    unwritten = torch.ones(LAYERS, STATES, dtype=torch.bool)
    unwritten[LAYER, written] = False
    assert torch.equal(actual_states[unwritten], states[unwritten])


def test_value_heads_may_read_any_key_head() -> None:
    tokens = Tokens([(0, 40)])
    inputs, states = inputs_of(40, (3, 4, 32, 32))
    heads = [2, 0, 0, 1]
    (actual, _), (expected, _) = (
        ruled(tokens, how, inputs, states, heads) for how in (functions, torchs)
    )
    near(actual, expected)


@pytest.mark.parametrize("cut", [1, 63, 64, 100])
def test_cuts_of_a_prompt_change_no_bit(cut: int) -> None:
    """The second part resumes from the state that the first has written."""
    whole = Tokens([(0, 130)])
    (inputs, states), channels = inputs_of(130, SHAPES[1]), 300
    x, weight = random(130, channels), random(channels, 1, 4)
    tails = random(LAYERS, STATES, 3, channels)
    expected, last = ruled(whole, functions, inputs, states)
    expected_conv, last_tails = convolved(whole, functions, x, weight, None, tails)
    for begin, end in pairwise((0, cut, 130)):
        part = Tokens([(begin, end - begin)])
        part.read = part.write = whole.write
        rows = slice(begin, end)
        actual, states = ruled(part, functions, [tensor[rows] for tensor in inputs], states)
        found_conv, tails = convolved(part, functions, x[rows], weight, None, tails)
        assert torch.equal(actual, expected[rows]) and torch.equal(found_conv, expected_conv[rows])
    assert torch.equal(states, last) and torch.equal(tails, last_tails)


def test_sequences_change_no_bit_of_others() -> None:
    tokens = Tokens([(3, 20), (0, 30)])
    inputs, states = inputs_of(50, SHAPES[1])
    actual, actual_states = ruled(tokens, functions, inputs, states)
    alone = Tokens([(3, 20)])
    alone.read, alone.write = tokens.read[:1], tokens.write[:1]
    expected, expected_states = ruled(alone, functions, [tensor[:20] for tensor in inputs], states)
    assert torch.equal(actual[:20], expected)
    assert torch.equal(actual_states[:, tokens.write[0]], expected_states[:, tokens.write[0]])


@pytest.mark.parametrize(("read", "write"), [(STATES, 0), (-1, 0), (0, STATES), (0, -1)])
def test_states_that_do_not_exist(read: int, write: int) -> None:
    tokens = Tokens([(3, 1)])
    tokens.read, tokens.write = torch.tensor([read]), torch.tensor([write])
    inputs, states = inputs_of(1, SHAPES[0])
    with pytest.raises(IndexError, match="9 states do not contain those of"):
        ruled(tokens, functions, inputs, states)
    weight, tails = random(20, 1, 4), random(LAYERS, STATES, 3, 20)
    with pytest.raises(IndexError, match="9 states do not contain those of"):
        convolved(tokens, functions, random(1, 20), weight, None, tails)


def test_other_dtypes_and_widths_run_on_torch() -> None:
    tokens = Tokens([(0, 5)])
    inputs, states = inputs_of(5, (1, 1, 8, 8))
    assert not delta.takes_heads(*inputs[:3], states)
    wide = [tensor.float() for tensor in inputs]
    for arguments in (inputs, wide):
        actual, expected = (ruled(tokens, how, arguments, states) for how in (functions, torchs))
        assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("width", [16, 24, 128])
def test_gates(tokens: int, width: int) -> None:
    x, gate = (4 * random(2, tokens, 3 * width + 8)[..., 8:]).unflatten(-1, (-1, width))
    weight = random(width)
    near(
        functions.gated_rms_norm(x, gate, weight, 1e-6),
        torchs.gated_rms_norm(x, gate, weight, 1e-6),
    )
    near(functions.sigmoid_gate(x, gate), torchs.sigmoid_gate(x, gate))
    near(functions.sigmoid_gate(x[:, 0], gate[:, 1]), torchs.sigmoid_gate(x[:, 0], gate[:, 1]))
