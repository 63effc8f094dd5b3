"""The header of a graph's text: the model, the layouts, the plan and the biases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tpcompile.ir.info import GraphInfo
from tpcompile.ir.layout import Layout
from tpcompile.ir.plan import Plan
from tpcompile.ir.text.folding import folded
from tpcompile.ir.text.layouts import LayoutNames
from tpcompile.ir.text.words import quoted
from tpcompile.ir.types import AnyType


def names_of_layouts(info: GraphInfo, kinds: Iterable[AnyType]) -> LayoutNames:
    """Name the layouts of a plan, and then those of types."""
    names = LayoutNames()
    if info.plan is not None:
        names.add(_layouts_of(info.plan))
    for kind in kinds:
        names.add_type(kind)
    return names


def header_lines(info: GraphInfo, names: LayoutNames) -> Iterator[str]:
    """Yield the header of a graph with these layouts."""
    yield f"graph {quoted(info.name)} (tp={info.tp})"
    yield f"model {quoted(info.model)}"
    if info.rotary:
        yield f"rotary {info.rotary.path} {info.rotary.config}"
    yield from _section("layouts", names.definitions())
    if info.plan is not None:
        yield from _section("plan", _plan(info.plan, names))
    yield from _section("biases", _biases(info))


def _section(title: str, lines: Iterator[str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        if number == 0:
            yield title
        yield f"  {line}"


def _layouts_of(plan: Plan) -> Iterator[Layout]:
    for heads in plan.heads.values():
        yield from (heads.queries, heads.keys)
    yield from (*plan.ffn.values(), plan.vocab)


def _plan(plan: Plan, names: LayoutNames) -> Iterator[str]:
    """Yield the layouts of attentions, of MLPs, and of the vocabulary."""

    def written(layout: Layout) -> str:
        grain = "" if layout.grain == 1 else f"*{layout.grain}"
        return names.written(layout) + grain

    users: dict[str, list[str]] = {}
    for name, heads in plan.heads.items():
        users.setdefault(f"{written(heads.queries)} {written(heads.keys)}", []).append(name)
    for name, layout in plan.ffn.items():
        users.setdefault(written(layout), []).append(name)
    for layouts, user_names in users.items():
        yield f"{layouts} : {', '.join(f'%{name}' for name in folded(user_names))}"
    yield written(plan.vocab)


def _biases(info: GraphInfo) -> Iterator[str]:
    """Yield the tensor names of biases; a bias that is not named like its weight names it."""
    usual = [b for b, w in info.biases if w == usual_weight(b) and b == quoted(b)]
    yield from folded(sorted(usual, key=_natural))
    for bias, weight in sorted(info.biases):
        if bias not in usual:
            yield f"{quoted(bias)} of {quoted(weight)}"


def usual_weight(bias: str) -> str:
    """Return the name of the weight to which a bias of this name usually belongs."""
    return bias.removesuffix("bias") + "weight"


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
