"""The table of mistakes: each kind with its mutators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.mutations import (
    biases,
    caches,
    collectives,
    formats,
    functions,
    heads,
    layouts,
    linear,
    meanings,
    nodes,
    recipes,
    slices,
    vocabulary,
)
from benchmarks.mutations.draft import Draft
from benchmarks.mutations.subjects import CACHED, PIPELINES, SHARDED

Mutate = Callable[[Draft], str]
"""Callback that edits the graph and returns a description, or raises `UnfitError`."""

_DERIVED = "every rank's number is derived from the layout, not from the node"
_ONE_RECIPE = "ranks take the format from the type; that of a recipe alone is not used"
_ANY_COLUMN = "the modules read any columns; programs read 16 at a time"
_SAME_VALUE = "the other operand, or the op that is skipped, is the same value"
_IN_PAIRS = "each layer reads the states that it wrote"
_MEMORY = "the rows are correct, but each rank holds them twice"


@dataclass(frozen=True)
class Kind:
    """A kind of mistake."""

    name: str
    ways: tuple[Mutate, ...]
    sharding: bool = True
    """Whether it is a sharding mistake, which the checker should notice."""
    silent: str = ""
    """The reason why the numbers may be correct nevertheless."""
    pipelines: tuple[str, ...] = SHARDED
    """The pipelines whose graphs have a place for the mistake."""
    may_be_right: bool = False
    """Whether an edit of this kind may compute the same values, and is then no mistake."""
    strict: bool = False
    """Whether the checker must refuse every mutant that changes the numbers."""


def _kind(name: str, *ways: Mutate, silent: str = "") -> Kind:
    return Kind(name, ways, silent=silent)


def _strict(name: str, *ways: Mutate, on: tuple[str, ...] = SHARDED, silent: str = "") -> Kind:
    return Kind(name, ways, silent=silent, pipelines=on, strict=True)


def _other(name: str, *ways: Mutate) -> Kind:
    return Kind(name, ways, sharding=False)


def _meaning(name: str, *ways: Mutate) -> Kind:
    """Return a kind that keeps types, so only the proof of values can notice it."""
    every = tuple(PIPELINES)
    return Kind(name, ways, sharding=False, silent=_SAME_VALUE, pipelines=every, may_be_right=True)


KINDS: tuple[Kind, ...] = (
    _kind("collective dropped", collectives.dropped),
    _kind("collective doubled", collectives.doubled),
    _kind("collective past a non-linear op", collectives.past_nonlinear),
    _kind("collective past the residual", collectives.past_residual),
    _kind("sum for gather, gather for sum", collectives.mistaken),
    _kind("gather along another dim", collectives.gather_dim),
    _kind("wrong shard dim", layouts.shard_dim),
    _kind("row weight split by rows", layouts.shard_dim_of_rows, slices.transposed_split),
    _kind("swapped slices", slices.swapped, slices.swapped_heads),
    _kind("shifted slices", slices.shifted),
    _kind("slice of another layer", slices.other_layer),
    _kind("fused, then sharded as one", slices.fused_as_one),
    _kind("fused parts in another order", slices.parts_swapped),
    _kind("fused parts read in another order", nodes.parts_read_swapped),
    _kind("wrong KV head", heads.other_kv_heads, nodes.kv_map_given),
    _kind("KV head by rank // k", heads.kv_by_habit),
    _kind("head split across ranks", heads.head_split, nodes.split_twice),
    _kind("bias on every rank", nodes.bias_on_every_rank),
    _kind("bias split unlike its weight", layouts.bias_elsewhere),
    _kind("norm over a sharded axis", nodes.norm_over_heads, nodes.norm_of_split),
    _kind("norm weight split", nodes.norm_weight_split),
    _kind("vocabulary offset missing", vocabulary.plain_embedding, vocabulary.plain_rows),
    _kind("vocabulary offset given", vocabulary.offset_given, silent=_DERIVED),
    _kind(
        "mask missing on padded rows",
        vocabulary.ids_clamped,
        vocabulary.ids_wrapped,
        vocabulary.padded_whole,
        vocabulary.padded_each,
    ),
    _kind("layouts differ between q and o", layouts.sides_differ),
    _kind("k unlike v, gate unlike up", layouts.parts_differ),
    _kind("split for another number of ranks", layouts.too_many_ranks),
    _kind("scatter to another number of ranks", layouts.scatter_for_more, silent=_DERIVED),
    _kind("uneven split with a gap", layouts.gap),
    _kind("uneven split with an overlap", layouts.overlap),
    _kind("Partial into swiglu", nodes.partial_into_swiglu),
    _kind("Partial into attention", nodes.partial_into_attention),
    _kind(
        "tied weight split twice", vocabulary.tied_twice, vocabulary.tied_other_dim, silent=_MEMORY
    ),
    _kind("local sizes in a split", nodes.local_split_sizes, silent=_DERIVED),
    _kind("split sizes swapped", nodes.split_sizes_swapped, silent=_DERIVED),
    _strict("layer of the cache", caches.layer_read, caches.layers_swapped, on=("decode",)),
    _strict("layer written twice", caches.layer_written, on=CACHED),
    _strict("blocks of one reader", caches.block_of_reader, on=("decode",)),
    _strict("blocks of one layer", caches.block_of_layer, on=CACHED),
    _strict("queries of another layer", caches.queries_of_layer, on=("decode",)),
    _strict("lse of another partial", caches.lse_of_another, on=("decode",)),
    _strict("values of another partial", caches.values_of_another, on=("decode",)),
    _strict("spans of another partial", caches.both_of_another, on=("decode",)),
    _strict("other spans", caches.spans_left_out, caches.lse_of_other_spans, on=("decode",)),
    _strict("gates of other heads", linear.gates_of_other_heads, linear.gates_moved),
    _strict("channels in the fused order", linear.channels_as_one),
    _strict("channels swapped", linear.channels_swapped),
    _strict("wrong key head", linear.key_heads_by_habit, linear.other_key_heads),
    _strict("decay in 16 bits", linear.decay_rounded),
    _strict("states of another layer", linear.state_of_layer, on=("fused",)),
    _strict("states out of order", linear.states_out_of_order, on=("fused",), silent=_IN_PAIRS),
    _strict("numbers of states", linear.numbers_of_states, on=("fused",)),
    _strict("states of other heads", linear.states_shifted, on=("fused",)),
    _strict("rows repeated", recipes.rows_repeated),
    _strict("rows skipped", recipes.rows_skipped),
    _strict("rows permuted", recipes.rows_permuted, recipes.columns_permuted),
    _strict("rows of another tensor", recipes.of_another_tensor),
    _strict(
        "order in heads",
        recipes.one_order_dropped,
        recipes.other_pairs,
        recipes.rotation_of_halves,
        on=("interleaved",),
    ),
    _strict("offsets left out", formats.offsets_left_out, silent=_ONE_RECIPE),
    _strict("offsets added", formats.offsets_added, silent=_ONE_RECIPE),
    _strict("other groups", formats.other_groups, silent=_ONE_RECIPE),
    _strict("other bits", formats.other_bits, silent=_ONE_RECIPE),
    _strict("other scales", formats.other_scales, silent=_ONE_RECIPE),
    _strict("columns cut in a load", formats.cut_elsewhere, silent=_ANY_COLUMN),
    _strict("bias dropped", biases.dropped),
    _strict("bias of another layer", biases.of_another_layer),
    _strict("bias of another projection", biases.of_another_projection, biases.parts_swapped),
    _strict("bias before the sum", biases.added_before_sum),
    _strict("bias added twice", biases.added_twice),
    _strict("bias behind another sum", biases.added_elsewhere),
    _other("k for v, gate for up", functions.fused_parts_swapped, functions.gate_for_up),
    _other("keys used as values", functions.keys_for_values),
    _other("tensor of another layer", functions.wrong_tensor, functions.parameter_of_other_layer),
    _other("decay of another layer", linear.decay_of_layer),
    _other("eps changed", functions.eps),
    _other("scale changed", functions.scale),
    _other("window changed", functions.window),
    _other("rotation dropped", functions.rope_dropped, functions.rope_tables),
    _other("norm dropped", functions.norm_dropped),
    _other("norms swapped", functions.norms_swapped),
    _other("residual from elsewhere", functions.residual),
    _other("starts from elsewhere", functions.sequences_joined),
    _other("ids made local twice", vocabulary.token_offset_twice),
    _other("head tied that is not", vocabulary.head_untied),
    _meaning("op skipped", meanings.skipped),
    _meaning("op applied twice", meanings.doubled),
    _meaning("another value of the type", meanings.other_value, meanings.other_parameter),
    _meaning("operands swapped", meanings.operands_swapped, meanings.items_swapped),
    _meaning("another eps or scale", meanings.number),
    _meaning("product for sum", meanings.other_op),
    _meaning("collective of another layer", meanings.other_collective),
)
