"""Graphs from text, checked: errors cite the lines."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from tpcompile.errors import VerifyError
from tpcompile.ir.checker import Checker
from tpcompile.ir.problem import Problem
from tpcompile.ir.text import GraphText, format_node, format_type, read_graph


def parse_graph(text: str, *, check: bool = True) -> fx.GraphModule:
    """Parse a graph from its text form, and check it.

    With `check=False`, an invalid graph is returned too, for inspection.
    """
    parsed = read_graph(text)
    if check:
        verify_text(parsed)
    return parsed.graph


def text_problems(parsed: GraphText) -> list[Problem]:
    """Check a graph, and that the types in its text are those of its values."""
    problems = Checker().check(parsed.graph)
    wrong = {problem.node for problem in problems}
    for node in parsed.graph.graph.nodes:
        written = parsed.types.get(node.name)
        if written is not None and node.name not in wrong and node.meta["type"] != written:
            got, right = format_type(written), format_type(node.meta["type"])
            line = format_node(node)
            hint = "correct the type in the text, or the operands"
            problems.append(Problem(node.name, "", "type", got, right, hint, line))
    problems.sort(key=lambda problem: parsed.lines.get(problem.node, 0))
    return [replace(p, source=f"line {parsed.lines.get(p.node, 0)}") for p in problems]


def verify_text(parsed: GraphText) -> None:
    """Raise `VerifyError` with the first problem of a graph, if there is any."""
    problems = text_problems(parsed)
    if problems:
        first = problems[0]
        raise VerifyError(
            f"The graph violates the rule {first.rule} ({len(problems)} problems in all)",
            where=f"{first.source}, %{first.node}",
            got=first.got,
            expected=first.expected,
            hint=first.hint,
        )
