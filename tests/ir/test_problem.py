"""A mistake in many places is said once, with all places in a short form."""

from __future__ import annotations

from typing import Any

from tpcompile.ir.problem import Problem, merged


def _problem(node: str, got: str = "this", **more: Any) -> Problem:
    return Problem(node, "", "input", got, "that", "", f"%{node} = input : f32[2]", **more)


def test_the_same_problem_of_many_nodes_is_said_once() -> None:
    many = [_problem(f"l{layer}_{name}") for name in ("q", "k") for layer in (0, 1, 2, 7)]
    other = _problem("norm", "something else")
    first, last = merged([*many[:2], other, *many[2:]])
    assert str(first).splitlines() == [
        "%l0_q breaks the rule input: found this; expected that.",
        "    %l0_q = input : f32[2]",
        "    8 nodes break this rule: %l{0..2,7}_q, %l{0..2,7}_k",
    ]
    assert (last, "break this rule" in str(last)) == (other, False)


def test_tensors_and_values_of_other_layers_are_the_same_mistake() -> None:
    alike = ("model.layers.{}.mlp.bias, scale=0.25", "a use of %l{}_v, 1e-06")
    for text in alike:
        (problem,) = merged([_problem(f"l{n}_q", text.format(n)) for n in (0, 11)])
        assert (problem.got, problem.others) == (text.format(0), ("l11_q",))
    assert len(merged([_problem("l0_q", "scale=0.25"), _problem("l1_q", "scale=0.5")])) == 2


def test_others_that_are_known_already_are_named_once() -> None:
    (problem,) = merged([_problem("l0_q", others=("l1_q", "l2_q")), _problem("l1_q")])
    assert problem.others == ("l1_q", "l2_q")


def test_many_different_names_are_shortened() -> None:
    numbered = [f"l{n}_top_{n}_scores" for n in range(20)]
    assert str(_problem("l0_q", others=tuple(numbered))).endswith(
        "21 nodes break this rule: %l0_q, %l{0..19}_top_*_scores"
    )
    letters = tuple("abcdefghij")
    assert str(_problem("x", others=letters)).endswith(
        "11 nodes break this rule: %x, %a, %b, %c, %d, %e, %f, %g, 3 other names"
    )


def test_whole_expressions_are_lines_of_their_own() -> None:
    problem = _problem("x", details=("before the pass: %x = 1", "after the pass:  %x = 2"))
    assert str(problem).splitlines()[1:] == [
        "    before the pass: %x = 1",
        "    after the pass:  %x = 2",
        "    %x = input : f32[2]",
    ]
    assert problem.to_json()["details"] == problem.details
