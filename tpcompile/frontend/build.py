"""Building the graph from the exported program: types, origins, parameters and all layers.

Only some layers were traced. The others are stamped: the nodes of a template layer are copied,
with the new layer's parameters and with the previous layer's output as input.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import fx, nn

from tpcompile.errors import UnsupportedError
from tpcompile.frontend.layers import Layers, layer_argument
from tpcompile.frontend.shell import INPUTS
from tpcompile.ir.meta import Origin, Parameter, new_parameter
from tpcompile.ir.module import StageModule
from tpcompile.ir.names import name_values
from tpcompile.ir.ops import ATTENTION, ROTARY, SPECS, TABLES
from tpcompile.ir.recipe import Tensor
from tpcompile.ir.types import ValueType

_METADATA_CHECK = torch.ops.aten._assert_tensor_metadata.default
_TABLE_NAMES = ("cos", "sin")
_WINDOW_ARGUMENT = SPECS[ATTENTION].argument_names.index("window")


@dataclass
class Builder:
    """Builder that copies the exported nodes in order, and stamps layers that were not traced."""

    program: torch.export.ExportedProgram
    layers: Layers
    traced: tuple[int, ...]
    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    rotary: nn.Module
    model: str
    """The model's class name, for messages."""
    root: nn.Module = field(default_factory=nn.Module)
    graph: fx.Graph = field(default_factory=fx.Graph)
    values: dict[fx.Node, fx.Node] = field(default_factory=dict)
    tables: fx.Node | None = None
    written: dict[str, fx.Node] = field(default_factory=dict)
    """Parameter nodes by tensor name."""

    def build(self) -> fx.GraphModule:
        self.root.add_module(ROTARY, self.rotary)
        before, regions, after = self._regions()
        entries = {layer: nodes.pop(0) for layer, nodes in regions.items()}
        handed_on = {layer: self._handed_on(layer, nodes) for layer, nodes in regions.items()}
        for node in before:
            self._copy(node)
        residual = self.values[entries[self.traced[0]].all_input_nodes[0]]
        for layer in range(len(self.layers.kinds)):
            template = self.layers.template(layer)
            self.values[entries[template]] = residual
            for node in regions[template]:
                self._copy(node, template, layer)
            residual = self.values[handed_on[template]]
        self.values[handed_on[self.traced[-1]]] = residual
        for node in after:
            self._copy(node)
        name_values(self.graph)
        for node in self.graph.nodes:
            if node.op != "get_attr":
                node.meta["value"] = node.name
        return StageModule(self.root, self.graph)

    def _regions(self) -> tuple[list[fx.Node], dict[int, list[fx.Node]], list[fx.Node]]:
        """Split the nodes: before the layers, in each traced layer, after the layers."""
        before: list[fx.Node] = []
        after: list[fx.Node] = []
        regions: dict[int, list[fx.Node]] = {layer: [] for layer in self.traced}
        for node in self.program.graph.nodes:
            place = self._place(node)
            if node.target is _METADATA_CHECK or _is_tensor(node):
                continue
            if place is not None:
                regions[place].append(node)
            else:
                (after if regions[self.traced[-1]] else before).append(node)
        return before, regions, after

    def _place(self, node: fx.Node) -> int | None:
        """Return the node's layer, or None if it is in no layer.

        Its number is part of the module path. Shared modules have no such path, so they are
        refused.
        """
        path = _module_path(node)
        member = path.removeprefix(f"{self.layers.path}.")
        if member != path and not member.partition(".")[0].isdigit():
            raise UnsupportedError(
                f"{self.model} has one module in several places",
                where=path,
                expected="a separate module in every place",
            )
        return self.layers.layer_of(path)

    def _handed_on(self, layer: int, region: list[fx.Node]) -> fx.Node:
        """Return the only value of a traced layer that later nodes read."""
        members = set(region)
        read = {
            node
            for node in region
            for user in node.users
            if user not in members and user.target is not _METADATA_CHECK
        }
        if len(read) != 1:
            raise UnsupportedError(
                f"Layer {layer} of {self.model} has {len(read)} outputs",
                where=self.layers.path,
                got=", ".join(f"%{node.name}" for node in read),
                expected="one output, the residual",
            )
        return read.pop()

    def _copy(self, node: fx.Node, template: int = 0, layer: int | None = None) -> None:
        origin = self._origin(node, template, layer)
        if node.op == "get_attr":
            raise UnsupportedError(
                f"{self.model} reads the constant {node.target}", where=str(origin)
            )
        for operand in node.all_input_nodes:
            if _is_tensor(operand):
                self.values[operand] = self._parameter(operand, template, layer, origin)
        copied = self.graph.node_copy(node, self.values.__getitem__)
        copied.meta = {"origin": origin}
        if node.op == "placeholder":
            copied.meta["type"] = ValueType((INPUTS[node.name],), torch.long)
        if node.op == "output":
            copied.args = (copied.args[0][0],)  # type: ignore[index]
        if node.target is TABLES:
            copied.op, copied.target = "call_module", ROTARY
            self.tables = copied
        if copied.target is operator.getitem and copied.args[0] is self.tables:
            copied.name = _TABLE_NAMES[int(copied.args[1])]  # type: ignore[arg-type]
        if (place := layer_argument(node.target)) is not None:
            copied.update_arg(place, layer)
        if node.target is ATTENTION:
            self._set_window(copied, layer, origin)
        self.values[node] = copied

    def _set_window(self, node: fx.Node, layer: int | None, origin: Origin) -> None:
        """Set the window of an attention node, which comes from the mask."""
        mask = None if layer is None else self.layers.masks[layer]
        if mask is None:
            raise UnsupportedError(
                f"{self.model} uses an attention mask that is not an argument of a layer",
                where=str(origin),
                expected="layers that each take their mask as an argument",
            )
        node.update_arg(_WINDOW_ARGUMENT, mask.window)

    def _parameter(
        self, node: fx.Node, template: int, layer: int | None, origin: Origin
    ) -> fx.Node:
        name = self._tensor_name(node, origin)
        if layer is not None and self.layers.layer_of(name) is not None:
            name = self.layers.renamed(name, template, layer)
        name = self.aliases.get(name, name)
        if name not in self.written:
            dtype = node.meta["val"].dtype
            parameter = Parameter.replicated(self.tensors[name], dtype, ranks=1)
            attribute = self._attribute(name)
            self.written[name] = new_parameter(self.graph, attribute, parameter, origin, self.root)
        return self.written[name]

    def _tensor_name(self, node: fx.Node, origin: Origin) -> str:
        """Return the name of a parameter in the shell."""
        signature = self.program.graph_signature
        name = signature.inputs_to_parameters.get(node.name)
        if name is None:
            buffer = signature.inputs_to_buffers.get(node.name, node.name)
            raise UnsupportedError(
                f"{self.model} reads the buffer {buffer.removeprefix('model.')}",
                where=str(origin),
                expected="a forward pass that reads parameters only",
            )
        return str(name).removeprefix("model.")

    def _attribute(self, name: str) -> str:
        """Return a short name for a parameter node: the layer, then the last two components."""
        layer = self.layers.layer_of(name)
        short = "_".join(name.split(".")[-2:])
        return short if layer is None else f"l{layer}_{short}"

    def _origin(self, node: fx.Node, template: int, layer: int | None) -> Origin:
        module = _module_path(node)
        if layer is not None:
            module = self.layers.renamed(module, template, layer)
        file, line = _source_line(node)
        return Origin(module, file, line, layer)


def _is_tensor(node: fx.Node) -> bool:
    """Return whether the node is a parameter or buffer, which exported programs take as input."""
    return node.op == "placeholder" and node.name not in INPUTS


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = str(next((path for path, _ in reversed(stack.values())), ""))
    return path.removeprefix("model.") if path.startswith("model.") else ""


_NOT_THE_MODEL = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/", "torch/")
"""Prefixes of other files. Torch reports some of its own relative to its build directory."""
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def _source_line(node: fx.Node) -> tuple[str, int]:
    """Return the innermost line of the model's own code, outside of torch and this package."""
    for file, line in reversed(_FRAME.findall(node.meta.get("stack_trace") or "")):
        if not file.startswith(_NOT_THE_MODEL):
            return file, int(line)
    return "", 0
