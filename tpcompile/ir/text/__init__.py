"""The text form of a graph: one line per node. The grammar is in docs/ir.md."""

from tpcompile.ir.text.parser import GraphText, read_graph
from tpcompile.ir.text.printer import format_graph, format_node, format_type

__all__ = ["GraphText", "format_graph", "format_node", "format_type", "read_graph"]
