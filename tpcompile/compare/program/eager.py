"""Hugging Face's own model, observed while it decodes each sequence with its own cache."""

from __future__ import annotations

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
from tpcompile.compare.program.spans import Seen, put_spans
from tpcompile.compare.program.structure import Structure
from tpcompile.compare.program.texts import Texts
from tpcompile.compare.rounded_cache import empty_cache
from tpcompile.errors import UnsupportedError
from tpcompile.ir.format import Format
from tpcompile.ir.meta import origin_of
from tpcompile.ir.ops import LINEAR
from tpcompile.runtime.cache_name import CACHE

_OUTPUTS = (
    *("norm", "q", "k", "v", "q_normed", "k_normed", "mlp_norm", "gate"),
    *("embedding", "final_norm"),
)
"""The values that modules of the model return. Residuals are the inputs of its norms."""


@dataclass(frozen=True)
class Spot:
    """The place where a value is observed: the output of a module, or its input."""

    module: str
    given: bool = False


@dataclass
class _Watch:
    """A recorder of the values of one sequence."""

    pieces: Pieces
    structure: Structure
    texts: Texts
    row: int
    seen: dict[int, Seen] = field(default_factory=dict)

    def put(self, key: Key, values: torch.Tensor) -> None:
        """Record a value of one token, which may have any shape."""
        row = (self.row, self.row + 1)
        self.pieces.put(key, values.detach().reshape(1, -1), "Hugging Face", rows=row)

    def put_attention(self, layer: int, seen: Seen, mixed: torch.Tensor) -> None:
        """Record the query, the visible keys and values, and the output of attention."""
        self.seen[layer] = seen
        found = {"q_rotated": seen.q, "k_rotated": seen.k[-1], "attention": mixed}
        for name, values in found.items():
            self.put((name, layer), values)
        kept = self.texts.seen(self.structure.layers[layer].window)
        rows = sum(kept[: self.row]), sum(kept[: self.row + 1])
        for name, side in (("k_cached", seen.k), ("v_cached", seen.v)):
            self.pieces.put((name, layer), side.flatten(1), "Hugging Face", rows=rows)


class Eager:
    """A Hugging Face model with one cache per sequence, and the places to observe."""

    def __init__(self, model: Any, structure: Structure, kv: Format | None = None) -> None:
        self._model, self._structure, self._kv = model, structure, kv
        self._spots = spots(structure)
        self._caches: list[Any] = []

    def fill(self, texts: Texts) -> None:
        """Run all tokens but the new ones, each sequence with an empty cache."""
        self._caches = [empty_cache(self._model.config, self._kv) for _ in texts.tokens]
        for text, cache in zip(texts.tokens, self._caches, strict=True):
            if len(text) > 1:
                self._run(text[:-1], 0, cache)

    def step(self, texts: Texts, groups: Sequence[Group]) -> Side:
        """Run the new tokens, and record all intermediate values."""
        whole = [replace(group, layout=None, interleaved=False) for group in groups]
        pieces = Pieces("eager", whole)
        seen: list[dict[int, Seen]] = []
        for row, (text, cache) in enumerate(zip(texts.tokens, self._caches, strict=True)):
            watch = _Watch(pieces, self._structure, texts, row)
            with self._watching(watch):
                logits = self._run(text[-1:], len(text) - 1, cache)
            watch.put(LOGITS, logits)
            watch.put(TOKEN, best_tokens(logits))
            seen.append(watch.seen)
        for layer in self._structure.layers:
            parts = [own[layer.number] for own in seen]
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
            for key, spot in self._spots.items():
                module = self._model.get_submodule(spot.module)
                hook = _hook(watch, key)
                handle = (
                    module.register_forward_pre_hook(lambda _, args, hook=hook: hook(args[0]))
                    if spot.given
                    else module.register_forward_hook(lambda *args, hook=hook: hook(args[-1]))
                )
                stack.callback(handle.remove)
            stack.enter_context(_attention_shown(self._model, watch))
            yield


def spots(structure: Structure) -> dict[Key, Spot]:
    """Return the place where the model computes each value, derived from the node's origin."""
    found: dict[Key, Spot] = {}
    nodes = dict(structure.named())
    for key, node in nodes.items():
        if key[0] in _OUTPUTS:
            found[key] = Spot(_module(node))
        elif key[0] == "attention_residual":
            found[key] = Spot(_module(nodes["mlp_norm", key[1]]), given=True)
        elif key[0] == "mlp_residual":
            norms = [n for (name, _), n in nodes.items() if name in ("norm", "final_norm")]
            after = next(norm for norm in norms if norm.args[0] is node)
            found[key] = Spot(_module(after), given=True)
        elif key[0] in ("swiglu", "activated"):
            down = next(user for user in node.users if user.target is LINEAR)
            found[key] = Spot(_module(down), given=True)
    return found


def _module(node: fx.Node) -> str:
    found = origin_of(node).module
    if not found:
        raise UnsupportedError(
            f"%{node.name} does not come from a module of the model",
            expected="an input or output of one of its modules",
        )
    return found


def _hook(watch: _Watch, key: Key) -> Callable[[torch.Tensor], None]:
    return lambda values: watch.put(key, values)


@contextmanager
def _attention_shown(model: Any, watch: _Watch) -> Iterator[None]:
    """Wrap the model's attention function, and record its arguments and its result.

    The wrapper replaces the function under the name in the model's setting, so the masks stay
    the same.
    """
    setting = model.config._attn_implementation or "eager"
    own = ALL_ATTENTION_FUNCTIONS.get(setting) or _modules_own(model)

    def shown(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        result = own(module, query, key, value, mask, **options)
        scale = options.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        q, k, v = (side[0].transpose(0, 1).detach() for side in (query, key, value))
        watch.put_attention(module.layer_idx, Seen(q[0], k, v, scale), result[0])
        return result

    before = ALL_ATTENTION_FUNCTIONS.get(setting)
    ALL_ATTENTION_FUNCTIONS[setting] = shown
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS.pop(setting)
        if before is not None and ALL_ATTENTION_FUNCTIONS.get(setting) is not before:
            ALL_ATTENTION_FUNCTIONS[setting] = before


def _modules_own(model: Any) -> Any:
    """Return the plain attention function, defined in the file of the model's own classes."""
    own = getattr(sys.modules[type(model).__module__], "eager_attention_forward", None)
    if own is None:
        raise UnsupportedError(
            f"{type(model).__name__} has no attention function that can be observed",
            hint='Load it with attn_implementation="sdpa"',
        )
    return own
