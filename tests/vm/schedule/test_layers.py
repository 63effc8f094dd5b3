"""Tests of copying equal layers: the program is that of assembling all instructions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from tests.captures import captured_once
from tests.vm.programs import Touch, steps
from tpcompile.passes import run_passes
from tpcompile.presets import preset
from tpcompile.scheduling import choose
from tpcompile.vm.groups.attention import PartialAttention
from tpcompile.vm.lowering import Lowered, lower
from tpcompile.vm.program import Buffer, Region
from tpcompile.vm.program.instruction import NONE
from tpcompile.vm.proof.cells import Parts
from tpcompile.vm.proof.verify import check_program
from tpcompile.vm.schedule import layers as module
from tpcompile.vm.schedule.assemble import Assembled, assemble
from tpcompile.vm.schedule.layers import Layers, repeated_layers
from tpcompile.vm.schedule.policies import DEFAULT_POLICY, POLICIES
from tpcompile.vm.targets import TARGETS

LAYERS = 7
OWN = 9
"""In random layers, the buffer of the first layer; the ends have the one before it."""
TARGET = TARGETS["cpu"]
X, Y, CACHE = 0, 1, 2
"""The buffers of the layers below; each layer has its own cache, from number 2 on."""


def region(buffer: int, start: int = 0, stop: int = 4) -> Region:
    return Region(buffer, ((start, stop),))


def chain_of_layers(count: int = LAYERS) -> tuple[list[Touch], list[int]]:
    """Return layers that store half of x in their caches and read them, and their numbers."""
    touches, layers = [Touch(writes=(region(X),))], [-1]
    for layer in range(count):
        cache = CACHE + layer
        for half in ((0, 2), (2, 4)):
            touches.append(Touch((region(X, *half),), (region(cache, *half),)))
        touches.append(Touch((region(cache),), (region(Y),)))
        touches.append(Touch((region(Y),), (region(X),)))
        layers += [layer] * 4
    return [*touches, Touch((region(X),))], [*layers, -1]


def alike(instructions: list[Touch], layers: list[int], costs: list[float]) -> Layers | None:
    return repeated_layers(Parts(tuple(instructions)), layers, [0] * len(layers), costs)


def test_repeated_layers_are_found() -> None:
    instructions, layers = chain_of_layers()
    costs = [1.0] * len(layers)
    repetition = alike(instructions, layers, costs)
    assert repetition == Layers(1 + 4, 4, LAYERS - 1)
    assert repetition.few(layers) == [-1, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 6, 6, 6, 6, -1]
    costs[1] = 2.0
    assert alike(instructions, layers, costs) == repetition, "the first layer may differ"


@pytest.mark.parametrize(("count", "before"), [(11, 1), (12, 2)])
def test_layers_of_two_kinds_in_turn_are_found(count: int, before: int) -> None:
    """A layer that does not fill a period comes before the first one."""
    instructions, layers = chain_of_layers(count)
    for layer in reversed(range(1, count, 2)):  # these layers also read x
        place = 1 + 4 * layer
        instructions.insert(place, Touch((region(X),)))
        layers.insert(place, layer)
    repetition = alike(instructions, layers, [1.0] * len(layers))
    assert repetition == Layers(layers.index(before), 4 + 5, 5)
    assert sorted(set(repetition.few(layers))) == [-1, *range(before + 4), count - 2, count - 1]


def test_layers_of_one_instruction_that_take_longer_are_not_alike() -> None:
    instructions, layers = chain_of_layers()
    costs = [1.0] * len(layers)
    costs[4 * 4 + 1] = 2.0
    assert alike(instructions, layers, costs) is None


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(Touch((region(CACHE + 2),), (region(Y),)), id="another layer's cache"),
        pytest.param(Touch((region(CACHE + 3, 0, 2),), (region(Y),)), id="less of its cache"),
        pytest.param(Touch((region(CACHE + 3),), (region(X),)), id="another buffer"),
        pytest.param(Touch((region(CACHE + 3),)), id="no write"),
        pytest.param(Touch((region(CACHE + 3),), (region(Y),), rank=1), id="another rank"),
    ],
)
def test_layers_with_other_accesses_are_not_alike(wrong: Touch) -> None:
    instructions, layers = chain_of_layers()
    number = 1 + 3 * 4 + 2
    instructions[number] = wrong
    ranks_of = [instruction.rank for instruction in instructions]
    costs = [1.0] * len(layers)
    assert repeated_layers(Parts(tuple(instructions)), layers, ranks_of, costs) is None


def test_a_cache_that_is_read_after_the_layers_is_not_left_out() -> None:
    instructions, layers = chain_of_layers()
    instructions[-1] = Touch((region(CACHE + 4),))
    assert alike(instructions, layers, [1.0] * len(layers)) is None


@pytest.mark.parametrize(
    "layers", [[], [-1, 0, 0, 1, 1], [0, 1, 0, 1, 2, 3, 4], [1, 2, 3, 4, 5], [-1] * 9]
)
def test_layers_that_cannot_be_left_out(layers: list[int]) -> None:
    instructions = [Touch((region(X),)) for _ in layers]
    assert alike(instructions, layers, [1.0] * len(layers)) is None


def of_layer(touch: Touch, private: int, layer: int) -> Touch:
    """Return the instruction with a layer's buffer instead of buffer `private`."""

    def moved(access: Region) -> Region:
        return access._replace(buffer=OWN + layer) if access.buffer == private else access

    joins = tuple(join._replace(region=moved(join.region)) for join in touch.joins)
    reads, writes = (tuple(map(moved, some)) for some in (touch.reads, touch.writes))
    return replace(touch, reads=reads, writes=writes, joins=joins)


def repeated(
    bodies: Sequence[tuple[Touch, ...]], private: int, ends: int
) -> tuple[list[Touch], list[int]]:
    """Return the instructions of layers, which have these bodies in turn, and their numbers.

    Buffer `private` is one per layer. The first instructions of the first body come also before all
    layers, and the last ones after them.
    """
    plain = [of_layer(touch, private, -1) for touch in bodies[0] if not touch.joins]
    before, after = plain[:ends], plain[max(0, len(plain) - ends) :]
    stacked = [(layer, bodies[layer % len(bodies)]) for layer in range(LAYERS * len(bodies))]
    layers = [of_layer(touch, private, layer) for layer, body in stacked for touch in body]
    numbers = [layer for layer, body in stacked for _ in body]
    return [*before, *layers, *after], [*([-1] * len(before)), *numbers, *([-1] * len(after))]


@pytest.mark.parametrize("kinds", [1, 2])
@given(steps(most=8, ranks=2), st.integers(0, 3), st.booleans(), st.randoms())
@settings(deadline=None)
def test_programs_of_random_layers_are_valid(
    kinds: int,
    drawn: tuple[tuple[Buffer, ...], tuple[Touch, ...]],
    ends: int,
    repeats: bool,
    dice: Random,
) -> None:
    shared, body = drawn
    private = dice.randrange(len(shared))
    shorter = tuple(touch for touch in body[1:] if touch.joins or dice.random() < 0.5)
    bodies = [body, (body[0], *shorter)][:kinds] if not body[0].joins else [body]
    instructions, layers = repeated(bodies, private, ends)
    buffers = [*shared, *[shared[private]] * (OWN + LAYERS * kinds - len(shared))]
    taken = {touch.label: dice.choice((1.0, 2.0, 3.5)) for touch in body}
    costs = [taken[instruction.label] for instruction in instructions]
    for policy in POLICIES:
        options = (policy, 2, 2, repeats)
        by_layer = assemble("", buffers, instructions, costs, *options, layers)
        assert check_program(by_layer.program) == []
        whole = assemble("", buffers, instructions, costs, *options)
        assert by_layer.longest(costs) == pytest.approx(whole.longest(costs))


@pytest.fixture(scope="module", params=[("qwen3-0.6b", 1), ("qwen2.5-0.5b", 3)], ids=str)
def lowered(request: pytest.FixtureRequest) -> Lowered:
    """A model with many layers, for seven workers per rank."""
    preset, tp = request.param
    choices = choose(tp=tp, target="cpu", workers=7)
    graph, _ = run_passes(captured_once(f"preset:{preset}").graph, choices.passes)
    return lower(graph, choices.plan)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_gives_the_same_program_with_copies(lowered: Lowered, policy: str) -> None:
    by_layer, whole = assembled(lowered, policy, lowered.layers), assembled(lowered, policy, ())
    assert by_layer.program == whole.program
    costs = [instruction.cost(TARGET) for instruction in lowered.instructions]
    assert by_layer.longest(costs) == pytest.approx(whole.longest(costs))
    assert len(by_layer.groups) == len(whole.groups) == len(costs)
    if policy == DEFAULT_POLICY:
        assert by_layer.copied and not whole.copied


def test_a_wrong_copy_is_found_by_the_verifier(
    lowered: Lowered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that waits for counters of the layer that it was copied from runs too early."""
    monkeypatch.setattr(module, "_from", lambda first, shift: lambda counter: counter)
    monkeypatch.setattr(module._Counters, "repeat", True)
    by_layer = assembled(lowered, DEFAULT_POLICY, lowered.layers)
    assert by_layer.copied
    assert check_program(by_layer.program)


def assembled(lowered: Lowered, policy: str, layers: Sequence[int]) -> Assembled:
    costs = [instruction.cost(TARGET) for instruction in lowered.instructions]
    options = (policy, lowered.plan.workers, lowered.ranks, True)
    return assemble("", lowered.buffers, lowered.instructions, costs, *options, layers)


WINDOW = 32


@cache
def in_turn(count: int) -> Lowered:
    """Return the step of a small model with a window in every second layer, on two ranks."""
    types = ["sliding_attention", "full_attention"]
    config = {
        **preset("tiny-qwen3"),
        "num_hidden_layers": count,
        "layer_types": [types[layer % 2] for layer in range(count)],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
    }
    choices = choose(tp=2, target="cpu", workers=7)
    graph, _ = run_passes(captured_once(AutoConfig.for_model(**config)).graph, choices.passes)
    return lower(graph, choices.plan)


def windowed_cost(instruction: Any) -> float:
    """Return the cost of an instruction whose attention reads no more tokens than its window."""
    if isinstance(instruction, PartialAttention) and instruction.at.window != NONE:
        instruction = replace(
            instruction,
            at=replace(instruction.at, planned=min(instruction.at.planned, instruction.at.window)),
        )
    cost: float = instruction.cost(TARGET)
    return cost


@pytest.mark.parametrize("policy", ["critical-path", "dynamic", "wave"])
def test_layers_in_turn_are_scheduled_once_per_kind(policy: str) -> None:
    """A longer model is more copies: no more instructions are scheduled."""
    scheduled = []
    for count in (11, 19):
        low = in_turn(count)
        costs = list(map(windowed_cost, low.instructions))
        options = ("", low.buffers, low.instructions, costs, policy, 7, low.ranks, True)
        by_layer, whole = assemble(*options, low.layers), assemble(*options)
        assert by_layer.program == whole.program
        assert by_layer.copied and check_program(by_layer.program) == []
        scheduled.append(len(by_layer._groups))
    assert scheduled[0] == scheduled[1]
