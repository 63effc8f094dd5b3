"""Calls of ops as terms: composites are opened to their bodies, and states are followed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from tpcompile.ir.ops import (
    ADD_RESIDUAL,
    ATTENTION_REDUCE,
    EMBEDDING,
    EXPERTS,
    LINEAR,
    LINEAR_RESIDUAL,
    PARTIAL_ATTENTION,
    SPECS,
    TOP_EXPERTS,
    VOCAB_EMBEDDING,
)
from tpcompile.ir.ops.composite import Operand, Part
from tpcompile.ir.ops.groups import heads_read
from tpcompile.ir.ops.resumed import RESUMED_CONV, RESUMED_DELTA_RULE
from tpcompile.vm.proof.terms import TOKENS, Term, Terms

aten = torch.ops.aten
_RESIDUALS = (ADD_RESIDUAL, LINEAR_RESIDUAL)


class Opened:
    """The interpreter of ops on the terms of one rank."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.stored: dict[tuple[str, int], Term] = {}
        """The contents of states and of the cache that calls have stored, by name and layer."""

    def operand(self, term: Term | None) -> Operand | None:
        """Return the stand-in for a value, on which ops can be called."""
        return None if term is None else Operand(term, self.called)

    def called(self, target: Any, args: tuple[Any, ...]) -> Any:
        """Return the term of a call, or a tuple of terms if it has several results."""
        if target is operator.getitem:
            return self.terms.call("item", *args)
        if isinstance(target, Part):
            return self._append(*args)
        spec = SPECS[target]
        bound = spec.bind(args, {})
        rule = _RULES.get(target)
        if rule is not None:
            return rule(self, *bound.values())
        if spec.pattern is None:
            return self.terms.call(spec.name, *bound.values())
        term = self.body(spec.reference, bound)
        return self.terms.call("rounded", term) if target in _RESIDUALS else term

    def body(self, function: Callable[..., Any], bound: Mapping[str, Any]) -> Any:
        """Run the body of a composite on terms."""
        operands = {n: self.operand(a) if isinstance(a, Term) else a for n, a in bound.items()}
        return function(**operands).kind

    def _append(
        self, q: Term, k: Term, v: Term, cache: Term, slots: Term, layer: int, block: int
    ) -> Term:
        if slots.args == ("slots",):  # the new token is in the last place of its sequence
            places = (self.terms.call("input", name) for name in ("lengths", "tables"))
            slots = self.terms.call("slots", *places, block)
        stored = [self.terms.call("stored", new, slots) for new in (k, v)]
        self.stored["cache", layer] = self.terms.call("cached tokens", layer, *stored)
        return q

    def _linear(self, x: Term, weight: Term, bias: Term | None) -> Term:
        return self.terms.linear(x, weight, bias)

    def _add(self, x: Term, other: Term, alpha: int) -> Term:
        return self.terms.total(x, other) if alpha == 1 else self.terms.call("add", x, other, alpha)

    def _mul(self, x: Term, other: Term) -> Term:
        shapes = (arg.shape for arg in (x, other) if isinstance(arg, Term))
        return self.terms.call("aten.mul", x, other, shape=max(shapes, key=lambda s: s[1:]))

    def _split(self, x: Term, sizes: Sequence[int], dim: int) -> Any:
        if dim % len(x.shape) != len(x.shape) - 1 or sum(sizes) != x.shape[-1]:
            return self.terms.call("split", x, sizes, dim)
        stops = [sum(sizes[:place]) for place in range(1 + len(sizes))]
        pairs = pairwise(stops)
        return tuple(self.terms.columns(x, start, stop) for start, stop in pairs)

    def _heads(self, x: Term, dim: int, sizes: Sequence[int]) -> Term:
        if dim != 1 or len(x.shape) != 2 or len(sizes) != 2:
            return self.terms.call("unflatten", x, dim, sizes)
        return self.terms.heads(x, sizes[1])

    def _flat(self, x: Term, first: int, last: int) -> Term:
        if (first, last, len(x.shape)) != (1, 2, 3):
            return self.terms.call("flatten", x, first, last)
        return self.terms.flat(x)

    def _rounded(self, x: Term, *_: Any) -> Term:
        """Leave out a call that only rounds."""
        return x

    def _wanted_rows(self, x: Term, dim: int, index: Term) -> Term:
        """Skip the selection of logit rows, because a decode step returns all rows."""
        whole = dim == 0 and index.args == ("logit_rows",)
        return x if whole else self.terms.call("index_select", x, dim, index)

    def _embedding(self, weight: Term, ids: Term, *_: Any) -> Term:
        return self._vocab_embedding(weight, ids, 0)

    def _vocab_embedding(self, weight: Term, ids: Term, first: int) -> Term:
        return self.terms.call("embedding", weight, ids, first, shape=(TOKENS, weight.shape[1]))

    def _top_experts(self, logits: Term, count: int, normalized: bool) -> Any:
        kinds = ("scores of top experts", "ids of top experts")
        shape = (TOKENS, count)
        return tuple(self.terms.call(k, logits, count, normalized, shape=shape) for k in kinds)

    def _experts(
        self, x: Term, scores: Term, ids: Term, gate_up: Term, down: Term, first: int
    ) -> Term:
        hidden = self.terms.gated_experts(x, ids, gate_up, first)
        return self.terms.sum_of_experts(hidden, scores, ids, down, first)

    def _attention(
        self,
        q: Term,
        cache: Term,
        tables: Term,
        lengths: Term,
        scale: float,
        window: int | None,
        layer: int,
        block: int,
        spans: int,
        kv_heads: Sequence[int] | None,
    ) -> Any:
        heads, width = q.shape[1:]
        if cache.name != "cached tokens":
            kv_heads = heads_read(heads, cache.shape[-2], kv_heads)
            cache = self.stored.get(("cache", layer), cache)
        read = tuple(kv_heads or ())
        operands = q, cache, tables, lengths, scale, window, block, spans, read
        shape = (TOKENS, heads, spans)
        values = self.terms.call("values of spans", *operands, shape=(*shape, width))
        return values, self.terms.call("lse of spans", *operands, shape=shape)

    def _merged(self, values: Term, lse: Term, dtype: Any) -> Term:
        tokens, heads, _, width = values.shape
        return self.terms.call("merged spans", values, lse, shape=(tokens, heads, width))

    def _conv(self, x: Term, weight: Term, bias: Term | None, tails: Term, *places: Any) -> Term:
        *inputs, layer = places
        operands = x, weight, bias, self._before("tails", tails, layer), *inputs
        self.stored["tails", layer] = self.terms.call("new tails", *operands)
        return self.terms.call("resumed convolution", *operands)

    def _delta(
        self, q: Term, k: Term, v: Term, decay: Term, beta: Term, states: Term, *places: Any
    ) -> Term:
        *inputs, layer, k_heads = places
        read = tuple(heads_read(v.shape[1], q.shape[1], k_heads))
        before = self._before("states", states, layer)
        operands = q, k, v, decay, beta, before, *inputs, read
        self.stored["states", layer] = self.terms.call("new states", *operands)
        return self.terms.call("resumed delta rule", *operands, shape=v.shape)

    def _before(self, name: str, states: Term, layer: int) -> Term:
        """Return the states of a layer, if the operand is those of all layers."""
        if states.name != "input":
            return states
        return self.stored.get((name, layer)) or self.terms.call("layer of", states, layer)


_RULES: dict[Any, Callable[..., Any]] = {
    LINEAR: Opened._linear,
    aten.add.Tensor: Opened._add,
    aten.mul.Tensor: Opened._mul,
    aten.split_with_sizes.default: Opened._split,
    aten.unflatten.int: Opened._heads,
    aten.flatten.using_ints: Opened._flat,
    aten.to.dtype: Opened._rounded,
    aten.index_select.default: Opened._wanted_rows,
    EMBEDDING: Opened._embedding,
    VOCAB_EMBEDDING: Opened._vocab_embedding,
    TOP_EXPERTS: Opened._top_experts,
    EXPERTS: Opened._experts,
    PARTIAL_ATTENTION: Opened._attention,
    ATTENTION_REDUCE: Opened._merged,
    RESUMED_CONV: Opened._conv,
    RESUMED_DELTA_RULE: Opened._delta,
}
"""The ops whose terms are not simply calls by their names."""
