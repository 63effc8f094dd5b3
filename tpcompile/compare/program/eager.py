"""Hugging Face's own model, watched while it decodes: every sequence by itself, with its cache."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tpcompile.compare.group_rows import LOGITS, TOKEN, best_tokens
from tpcompile.compare.groups import Group, Key, Pieces, Side
from tpcompile.compare.program.spans import Seen, put_spans
from tpcompile.compare.program.structure import Structure
from tpcompile.compare.program.texts import Texts
from tpcompile.errors import UnsupportedError
from tpcompile.ir.meta import origin_of
from tpcompile.ir.ops import LINEAR

_OUTPUTS = ("norm", "q", "k", "v", "q_normed", "k_normed", "mlp_norm", "embedding", "final_norm")
"""What modules of the model return; residuals are what its norms are given."""


@dataclass(frozen=True)
class Spot:
    """Where a value can be seen: what a module returns, or what it is given."""

    module: str
    given: bool = False


@dataclass
class _Watch:
    """Writes down what is seen of one sequence."""

    pieces: Pieces
    structure: Structure
    texts: Texts
    row: int
    seen: dict[int, Seen] = field(default_factory=dict)

    def put(self, key: Key, values: torch.Tensor) -> None:
        """The one row of a value, in whatever shape the model has it."""
        row = (self.row, self.row + 1)
        self.pieces.put(key, values.detach().reshape(1, -1), "Hugging Face", rows=row)

    def put_attention(self, layer: int, seen: Seen, mixed: torch.Tensor) -> None:
        """What attention was given, keys and values of all tokens seen, and what it returned."""
        self.seen[layer] = seen
        found = {"q_rotated": seen.q, "k_rotated": seen.k[-1], "attention": mixed}
        for name, values in found.items():
            self.put((name, layer), values)
        kept = self.texts.seen(self.structure.layers[layer].window)
        rows = sum(kept[: self.row]), sum(kept[: self.row + 1])
        for name, side in (("k_cached", seen.k), ("v_cached", seen.v)):
            self.pieces.put((name, layer), side.flatten(1), "Hugging Face", rows=rows)


class Eager:
    """A Hugging Face model with a cache for each sequence, and the places to watch."""

    def __init__(self, model: Any, structure: Structure) -> None:
        self._model, self._structure = model, structure
        self._spots = spots(structure)
        self._caches: list[Any] = []

    def fill(self, texts: Texts) -> None:
        """Run all but the new tokens, each sequence behind nothing."""
        self._caches = [DynamicCache(config=self._model.config) for _ in texts.tokens]
        for text, cache in zip(texts.tokens, self._caches, strict=True):
            if len(text) > 1:
                self._run(text[:-1], 0, cache)

    def step(self, texts: Texts, groups: Sequence[Group]) -> Side:
        """Run the new tokens, and see all that is computed on the way."""
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
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        logits: torch.Tensor = out.logits[0]
        return logits

    @contextmanager
    def _watching(self, watch: _Watch) -> Iterator[None]:
        """Hooks on modules, and on the attention function; all are gone behind."""
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
    """Where the model has each value, told by where its node comes from."""
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
        elif key[0] == "swiglu":
            down = next(user for user in node.users if user.target is LINEAR)
            found[key] = Spot(_module(down), given=True)
    return found


def _module(node: fx.Node) -> str:
    found = origin_of(node).module
    if not found:
        raise UnsupportedError(
            f"%{node.name} is no value of the model's own",
            expected="what one of its modules returns or is given",
        )
    return found


def _hook(watch: _Watch, key: Key) -> Callable[[torch.Tensor], None]:
    return lambda values: watch.put(key, values)


@contextmanager
def _attention_shown(model: Any, watch: _Watch) -> Iterator[None]:
    """The attention that the model has anyway, whose arguments and result are written down.

    It takes the place of the one that the model's setting names, so masks stay what they are.
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
    """The plain one, which stands in the file of the model's own classes."""
    own = getattr(sys.modules[type(model).__module__], "eager_attention_forward", None)
    if own is None:
        raise UnsupportedError(
            f"{type(model).__name__} has no attention function that could be watched",
            hint='Load it with attn_implementation="sdpa"',
        )
    return own
