"""Hugging Face's own model, observed while it decodes each sequence with its own cache."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tpcompile.compare.group_rows import LOGITS, TOKEN, best_tokens
from tpcompile.compare.groups import Group, Key, Pieces, Side
from tpcompile.compare.program.layers import AttentionLayer, DeltaLayer
from tpcompile.compare.program.spans import AttentionInput, put_spans
from tpcompile.compare.program.structure import Structure
from tpcompile.compare.program.texts import Texts
from tpcompile.compare.rounded_cache import empty_cache
from tpcompile.compare.routing import Experts, routed
from tpcompile.errors import UnsupportedError
from tpcompile.frontend.mixers import (
    CHUNK,
    CONV,
    RECURRENT,
    UPDATE,
    forward_with,
    function_of,
)
from tpcompile.ir.format import Format
from tpcompile.ir.layout import Interval
from tpcompile.ir.meta import operand, origin_of, value_type
from tpcompile.ir.ops import LINEAR
from tpcompile.ir.ops.experts import Routed
from tpcompile.ir.roles import HeadParts, Run
from tpcompile.rewriting.structure import weight_of
from tpcompile.runtime.cache_name import CACHE

_OUTPUTS = (
    *("norm", "q", "k", "v", "q_normed", "k_normed", "attention_gate", "mlp_norm", "gate"),
    *("embedding", "final_norm", "shared_gate"),
)
"""The values that modules of the model return. Residuals are the inputs of its norms."""
_INPUTS = ("attention", "mixed", "swiglu", "activated")
"""The values that are inputs of a linear, if they are not the results of a function."""
_OF_ROUTER = {"router": 0, "scores": 1, "choice": 2}
"""The values that a router returns, and their places among its results."""


@dataclass(frozen=True)
class Spot:
    """The place where a value, or some of its columns, is observed."""

    module: str
    is_input: bool = False
    """Whether it is the module's input, and not its output."""
    run: Run | None = None
    """The part of each head of the module's output that it is, if it is not the whole output."""
    columns: Interval | None = None
    item: int | None = None
    """Its place among several outputs."""

    def part(self, observed: Any) -> torch.Tensor:
        """Return the value, as one row, given the module's input or output for one token."""
        values: torch.Tensor = observed if self.item is None else observed[self.item]
        if self.run is None:
            return values.reshape(1, -1)
        last = self.run.first + self.run.width
        return values.reshape(-1, self.run.stride)[:, self.run.first : last].reshape(1, -1)


@dataclass
class _Watch:
    """A recorder of the values of one sequence."""

    pieces: Pieces
    structure: Structure
    texts: Texts
    row: int
    attention_inputs: dict[int, AttentionInput] = field(default_factory=dict)

    def put(
        self, key: Key, values: torch.Tensor, columns: Interval | None = None, rows: int = 1
    ) -> None:
        """Record a value of the sequence, which may have any shape, or some of its columns."""
        interval = (self.row * rows, (self.row + 1) * rows)
        flat = values.detach().reshape(rows, -1)
        self.pieces.put(key, flat, "Hugging Face", rows=interval, columns=columns)

    def put_attention(self, layer: int, visible: AttentionInput, mixed: torch.Tensor) -> None:
        """Record the query, the visible keys and values, and the output of attention."""
        self.attention_inputs[layer] = visible
        kind = self.structure.layers[layer]
        assert isinstance(kind, AttentionLayer)
        recorded = {"q_rotated": visible.q, "k_rotated": visible.k[-1], kind.result: mixed}
        for name, values in recorded.items():
            self.put((name, layer), values)
        counts = self.texts.visible_counts(kind.window)
        rows = sum(counts[: self.row]), sum(counts[: self.row + 1])
        for name, side in (("k_cached", visible.k), ("v_cached", visible.v)):
            self.pieces.put((name, layer), side.flatten(1), "Hugging Face", rows=rows)


class Eager:
    """A Hugging Face model with one cache per sequence, and the places to observe."""

    def __init__(self, model: Any, structure: Structure, kv: Format | None = None) -> None:
        self._model, self._structure, self._kv = model, structure, kv
        self._spots = spots(structure)
        self._caches: list[Any] = []

    def fill(self, texts: Texts, experts: Sequence[Experts] = ()) -> list[Experts]:
        """Run all tokens but the new ones, each sequence with an empty cache.

        Return the choices of experts by sequence. `experts` are those to choose instead.
        """
        self._caches = [empty_cache(self._model.config, self._kv) for _ in texts.tokens]
        choices: list[Experts] = []
        for row, (text, cache) in enumerate(zip(texts.tokens, self._caches, strict=True)):
            recorded: dict[int, Routed] = {}
            if len(text) > 1:
                forced = experts[row] if experts else None
                with routed(self._model, self._structure.routers, forced) as recorded:
                    self._run(text[:-1], 0, cache)
            choices.append({layer: choice.ids for layer, choice in recorded.items()})
        return choices

    def step(self, texts: Texts, groups: Sequence[Group], experts: Experts | None = None) -> Side:
        """Run the new tokens, and record all intermediate values.

        `experts` are those of each sequence that routers choose instead of their own.
        """
        whole = [replace(group, layout=None, interleaved=False) for group in groups]
        pieces = Pieces("eager", whole)
        visible: list[dict[int, AttentionInput]] = []
        for row, (text, cache) in enumerate(zip(texts.tokens, self._caches, strict=True)):
            watch = _Watch(pieces, self._structure, texts, row)
            row_experts = (
                None
                if experts is None
                else {number: ids[row : row + 1] for number, ids in experts.items()}
            )
            with routed(self._model, self._structure.routers, row_experts), self._watching(watch):
                logits = self._run(text[-1:], len(text) - 1, cache)
            watch.put(LOGITS, logits)
            watch.put(TOKEN, best_tokens(logits))
            visible.append(watch.attention_inputs)
        for layer in self._structure.attention:
            parts = [by_layer[layer.number] for by_layer in visible]
            spans, block = self._structure.spans, self._structure.block
            put_spans(pieces, layer.number, parts, texts.lengths, spans, block)
        return pieces.side()

    def _run(self, ids: torch.Tensor, first: int, cache: Any) -> torch.Tensor:
        places = torch.arange(first, first + len(ids))
        with torch.inference_mode():
            out = self._model(
                ids[None],
                position_ids=places[None],
                use_cache=True,
                logits_to_keep=1,
                **{CACHE: cache},
            )
        logits: torch.Tensor = out.logits[0]
        return logits

    @contextmanager
    def _watching(self, watch: _Watch) -> Iterator[None]:
        """Install hooks on the modules and the attention function, and remove them afterwards."""
        with ExitStack() as stack:
            for key, places in self._spots.items():
                for spot in places:
                    self._hook(stack, spot, _hook(watch, key, spot))
            stack.enter_context(_attention_shown(self._model, watch))
            for layer in self._structure.deltas:
                stack.enter_context(_delta_shown(self._model, layer, watch))
            yield

    def _hook(self, stack: ExitStack, spot: Spot, hook: Callable[[Any], None]) -> None:
        module = self._model.get_submodule(spot.module)
        handle = (
            module.register_forward_pre_hook(lambda _, args: hook(args[0]))
            if spot.is_input
            else module.register_forward_hook(lambda *args: hook(args[-1]))
        )
        stack.callback(handle.remove)


def spots(structure: Structure) -> dict[Key, tuple[Spot, ...]]:
    """Return the places where the model computes each value, derived from the nodes' origins."""
    places: dict[Key, tuple[Spot, ...]] = {}
    nodes = dict(structure.named())
    for key, node in nodes.items():
        readers = [user for user in node.users if user.target is LINEAR]
        if key[0] in _OUTPUTS:
            places[key] = (Spot(_module(node), run=_run_of(node)),)
        elif key[0] in _OF_ROUTER:
            places[key] = (Spot(_module(node), item=_OF_ROUTER[key[0]]),)
        elif key[0] in ("projected", "z", "gates"):
            places[key] = tuple(_parts(node))
        elif key[0] == "attention_residual":
            places[key] = (Spot(_module(nodes["mlp_norm", key[1]]), is_input=True),)
        elif key[0] == "mlp_residual":
            norms = [norm for (name, _), norm in nodes.items() if name in ("norm", "final_norm")]
            after = next(norm for norm in norms if norm.args[0] is node)
            places[key] = (Spot(_module(after), is_input=True),)
        elif key[0] in _INPUTS and readers:
            places[key] = (Spot(_module(readers[0]), is_input=True),)
    return places


def _run_of(node: fx.Node) -> Run | None:
    """Return the part of each head that a linear, or an item of its result, computes."""
    is_item = node.target is operator.getitem
    linear, place = (operand(operand(node)), _place(node)) if is_item else (node, 0)
    role = value_type(weight_of(linear)).role if linear.target is LINEAR else None
    run = role.runs[place] if isinstance(role, HeadParts) else None
    return run if run is not None and run.stride else None


def _parts(linear: fx.Node) -> Iterator[Spot]:
    """Yield the places of the parts of a linear, which is fused if its result is split."""
    (split,) = linear.users
    if split.target is not torch.ops.aten.split_with_sizes.default:
        yield Spot(_module(linear))
        return
    stop = 0
    for item in sorted(split.users, key=_place):
        start, stop = stop, stop + value_type(item).extent(-1)
        yield Spot(_module(item), columns=(start, stop))


def _place(item: fx.Node) -> int:
    place = item.args[1]
    assert isinstance(place, int)
    return place


def _module(node: fx.Node) -> str:
    path = origin_of(node).module
    if not path:
        raise UnsupportedError(
            f"%{node.name} does not come from a module of the model",
            expected="an input or output of one of its modules",
        )
    return path


def _hook(watch: _Watch, key: Key, spot: Spot) -> Callable[[Any], None]:
    return lambda values: watch.put(key, spot.part(values), spot.columns)


@contextmanager
def _attention_shown(model: Any, watch: _Watch) -> Iterator[None]:
    """Wrap the model's attention function, and record its arguments and its result.

    The wrapper replaces the function under the name in the model's setting, so the masks stay
    the same.
    """
    setting = model.config._attn_implementation or "eager"
    attention = ALL_ATTENTION_FUNCTIONS.get(setting) or _modules_own(model)

    def wrapper(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        output = attention(module, query, key, value, mask, **options)
        scale = options.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        q, k, v = (side[0].transpose(0, 1).detach() for side in (query, key, value))
        watch.put_attention(module.layer_idx, AttentionInput(q[0], k, v, scale), output[0])
        return output

    before = ALL_ATTENTION_FUNCTIONS.get(setting)
    ALL_ATTENTION_FUNCTIONS[setting] = wrapper
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS.pop(setting)
        if before is not None and ALL_ATTENTION_FUNCTIONS.get(setting) is not before:
            ALL_ATTENTION_FUNCTIONS[setting] = before


@contextmanager
def _delta_shown(model: Any, layer: DeltaLayer, watch: _Watch) -> Iterator[None]:
    """Let a layer of linear attention call functions that record their arguments and results."""
    net = model.get_submodule(_module(layer.nodes["delta_rule"]))
    functions = {
        name: _rule_shown(function_of(net, name), layer, watch) for name in (CHUNK, RECURRENT)
    }
    for name, place in ((CONV, 0), (UPDATE, 1)):
        functions[name] = _conv_shown(function_of(net, name), place, layer, watch)
    before = {"forward": net.forward} if "forward" in vars(net) else {}
    net.forward = forward_with(net, functions)
    try:
        yield
    finally:
        del net.forward
        vars(net).update(before)


def _rule_shown(rule: Any, layer: DeltaLayer, watch: _Watch) -> Any:
    """Wrap a function of the delta rule."""

    def wrapper(query: Any, key: Any, value: Any, g: Any, beta: Any, **options: Any) -> Any:
        mixed, state = rule(query, key, value, g=g, beta=beta, **options)
        recorded = {"decay": g, "beta": beta, "state": state, "delta_rule": mixed}
        for name, values in recorded.items():
            watch.put((name, layer.number), values)
        return mixed, state

    return wrapper


def _conv_shown(conv: Any, place: int, layer: DeltaLayer, watch: _Watch) -> Any:
    """Wrap a function of the convolution. The argument at `place` ends with the last inputs."""

    def wrapper(*args: Any, **options: Any) -> Any:
        output = conv(*args, **options)
        tail = args[place][0, :, -layer.tail_length :].t()
        watch.put(("tail", layer.number), tail, rows=layer.tail_length)
        parts = output[0, :, -1].split(list(layer.channels.values()))
        for name, values in zip(layer.channels, parts, strict=True):
            watch.put((name, layer.number), values)
        return output

    return wrapper


def _modules_own(model: Any) -> Any:
    """Return the plain attention function, defined in the file of the model's own classes."""
    attention = getattr(sys.modules[type(model).__module__], "eager_attention_forward", None)
    if attention is None:
        raise UnsupportedError(
            f"{type(model).__name__} has no attention function that can be observed",
            hint='Load it with attn_implementation="sdpa"',
        )
    return attention
