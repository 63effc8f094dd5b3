"""The values that a graph's program must make."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.vm.groups.lowered import CASES, Case, graph, lowered
from tpcompile.vm.program import Role
from tpcompile.vm.proof.expected import NEXT, Expected
from tpcompile.vm.proof.terms import Terms

SHARDED = Case("tiny-qwen3", 3, "rows", batch=1)
HYBRID = next(case for case in CASES if case.model == "tiny-qwen3.5")


def _expected(case: Case) -> Expected:
    return Expected(graph(case.model, case.tp, case.spans, case.interleaved), Terms())


@pytest.mark.parametrize("case", [Case(), SHARDED, HYBRID], ids=str)
def test_outputs_are_all_that_persists_and_the_logits(case: Case) -> None:
    outputs = _expected(case).outputs
    roles = {(output.rank, output.role) for output in outputs}
    persist = {buffer.role for buffer in lowered(case).buffers if buffer.role.kind == "cache"}
    for rank in range(case.tp):
        assert {role for other, role in roles if other == rank} == {
            *NEXT.values(),
            *persist,
            Role.LOGITS,
        }
    cached = [output for output in outputs if output.role == Role.CACHE and output.rank == 0]
    layers = {output.part[0] for output in cached}
    assert len(cached) == 2 * len(layers), "keys and values of each layer"


def test_ranks_choose_the_same_token_from_all_logits() -> None:
    outputs = _expected(SHARDED).outputs
    tokens = {output.value for output in outputs if output.role == Role.TOKENS}
    logits = {output.value for output in outputs if output.role == Role.LOGITS}
    (chosen,) = {value.args[0] for value in tokens}
    assert len(logits) == 3 and set(chosen.operands) == logits
    assert [arg for arg in chosen.args if isinstance(arg, int)] == [0, 338, 676]


def test_residuals_are_the_same_on_all_ranks_and_heads_are_not() -> None:
    expected = _expected(SHARDED)
    named = {name: value for value, name in expected.names.items()}
    assert named["%l1_all_reduce_residual"].name == "rounded"
    assert expected.parameter("l0_input_layernorm_weight", 0) is expected.parameter(
        "l0_input_layernorm_weight", 2
    )
    weights = {expected.parameter("l0_q_k_v_proj_weight", rank) for rank in range(3)}
    assert len(weights) == 3 and expected.parameter("l9", 0) is None


@pytest.mark.parametrize("case", CASES, ids=str)
def test_lowered_buffers_fit_the_graph(case: Case) -> None:
    expected = _expected(case)
    assert not [buffer for buffer in lowered(case).buffers if expected.misfit(buffer)]


@pytest.mark.parametrize(
    ("role", "changed"),
    [
        (Role.WEIGHT, {"shape": (1, 1)}),
        (Role.WEIGHT, {"name": "none"}),
        (Role.CACHE, {"storage": (1, 2, 8, 2, 16)}),
        (Role.STATES, {"shape": (9, 2, 3)}),
    ],
)
def test_other_buffers_do_not(role: Role, changed: dict[str, object]) -> None:
    expected = _expected(HYBRID)
    buffer = next(buffer for buffer in lowered(HYBRID).buffers if buffer.role == role)
    assert not expected.misfit(buffer)
    assert expected.misfit(replace(buffer, **changed))  # type: ignore[arg-type]
