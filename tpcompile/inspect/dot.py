"""A graph in the Graphviz language: layers are boxes, placements are colours."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from tpcompile.ir.info import info_of
from tpcompile.ir.meta import origin_of, parameter_of
from tpcompile.ir.ops import ALL_REDUCE_RESIDUAL, COLLECTIVES
from tpcompile.ir.text import format_node, format_type
from tpcompile.ir.types import AnyType, Partial, Placement, Replicate, Shard, ValueType

_COLOURS: dict[type[Placement], str] = {
    Replicate: "white",
    Shard: "lightskyblue",
    Partial: "orange",
}
_COLLECTIVE = 'shape=doubleoctagon, penwidth=2, color="firebrick"'
_SHAPES = {
    "placeholder": "shape=ellipse",
    "output": "shape=ellipse",
    "get_attr": "shape=note, fontsize=9",
}
_HEAD = """\
  rankdir=TB; labelloc=t; fontname="Helvetica";
  node [shape=box, style="filled,rounded", fillcolor=white, fontname="Helvetica", fontsize=10];
  edge [color=gray40, arrowsize=0.6];"""
_LEGEND = "white: Replicate, blue: Shard, orange: Partial; red octagons: collectives"


def graph_dot(gm: fx.GraphModule, rank: int | None = None) -> str:
    """Return the graph as one `digraph`, with the shapes of one rank if `rank` is given."""
    info = info_of(gm)
    whose = f"tp={info.tp}" if rank is None else f"rank {rank} of {info.tp}"
    label = _quoted(f"{info.name} ({whose})", _LEGEND)
    lines = [f"digraph {_quoted(info.name)} {{", f"  label={label};", _HEAD]
    for layer, nodes in _by_layer(gm.graph).items():
        indent = "  "
        if layer is not None:
            lines += [f"  subgraph cluster_layer_{layer} {{", f'    label="layer {layer}";']
            lines.append("    style=rounded; color=gray60;")
            indent = "    "
        lines += [indent + _node(node, rank) for node in nodes]
        lines += ["  }"] if layer is not None else []
    lines += (f"  {edge}" for edge in _edges(gm.graph))
    return "\n".join([*lines, "}"]) + "\n"


def _by_layer(graph: fx.Graph) -> dict[int | None, list[fx.Node]]:
    nodes: dict[int | None, list[fx.Node]] = {}
    for node in graph.nodes:
        inner = node.op not in ("placeholder", "output")
        nodes.setdefault(origin_of(node).layer if inner else None, []).append(node)
    return nodes


def _node(node: fx.Node, rank: int | None) -> str:
    crosses = node.target in (*COLLECTIVES, ALL_REDUCE_RESIDUAL)
    style = _COLLECTIVE if crosses else _SHAPES.get(node.op, "")
    kind: AnyType | None = node.meta.get("type")
    colour = f"fillcolor={_colour(kind)}"
    attributes = ", ".join(filter(None, (f"label={_label(node, kind, rank)}", style, colour)))
    return f"{_quoted(node.name)} [{attributes}, tooltip={_quoted(format_node(node, rank))}];"


def _label(node: fx.Node, kind: AnyType | None, rank: int | None) -> str:
    """Return a label with the operation, the name and the type. The tooltip has the rest."""
    if node.op == "output":
        return _quoted("return")
    title = {"placeholder": "input", "get_attr": ""}.get(node.op)
    if title is None:
        title = _expression_name(node)
    elif node.op == "get_attr":
        title = parameter_of(node).describe(rank).replace(" ++ ", "\n++ ")
    parts = kind if isinstance(kind, tuple) else (kind,)
    types = [format_type(part, rank) for part in parts if part is not None]
    name = [] if node.op == "get_attr" else [f"%{node.name}"]
    return _quoted(*title.split("\n"), *name, *types)


def _expression_name(node: fx.Node) -> str:
    """Return `aten.linear` for `%q = aten.linear(%n, %w) : …`, and `%s[0]` unchanged."""
    expression = format_node(node).partition(" = ")[2].partition(" : ")[0]
    return expression.partition("(")[0]


def _colour(kind: AnyType | None) -> str:
    first = kind[0] if isinstance(kind, tuple) else kind
    return _COLOURS[type(first.placement)] if isinstance(first, ValueType) else "white"


def _edges(graph: fx.Graph) -> Iterator[str]:
    for node in graph.nodes:
        for source in node.all_input_nodes:
            yield f"{_quoted(source.name)} -> {_quoted(node.name)};"


def _quoted(*lines: str) -> str:
    """Join the lines into a Graphviz string, with backslashes and quotes escaped."""
    escaped = (line.replace("\\", "\\\\").replace('"', '\\"') for line in lines)
    return '"' + "\\n".join(escaped) + '"'
