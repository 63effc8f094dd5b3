"""The meaning of a model's attention masks, found by evaluating the masks.

Eager attention takes causality and sliding windows from the mask alone, so a graph must do the
same. While layers are watched, Hugging Face's mask builders return a `Mask` instead of a tensor.
It carries the function of positions that the builder would have tabulated. This function is
compared with the masks that `tpc.attention` can express. Any other mask is refused, and so is
any other use of a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from tpcompile.errors import UnsupportedError

ATTENTION_ONLY = "tpcompile"
"""Name of our attention function in Hugging Face; its mask builders return None for it."""
WITH_MASKS = "tpcompile, with masks"
"""Second name of this function; the mask builders return a `Mask` for it."""

_EXPECTED = "a causal mask, with or without a sliding window"


@dataclass(frozen=True, eq=False)
class Mask:
    """Placeholder for an attention mask; any use other than passing it on raises."""

    function: Callable[..., torch.Tensor]
    """Maps `(batch, head, query, key)` indices to whether the query attends to the key."""
    custom: bool
    """Whether the model passed its own function, which may be valid only for scalar indices."""
    sizes: tuple[tuple[str, int], ...]
    """Settings that limit how far back a token attends, by name."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _changed(name)

    def __getitem__(self, index: object) -> NoReturn:
        raise _changed("indexing")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise _changed(getattr(function, "__name__", str(function)))


@dataclass(frozen=True)
class Meaning:
    """A mask in the terms of `tpc.attention`."""

    window: int | None
    """The number of tokens that a token attends to, itself included; None for all earlier ones."""
    splits: frozenset[bool]
    """Possible answers to whether packed sequences are separated: both if the window is 1."""


def register(attention: Callable[..., Any]) -> None:
    """Register our attention function and our masks with Hugging Face."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_ONLY, attention)
    ALL_ATTENTION_FUNCTIONS.register(WITH_MASKS, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(WITH_MASKS, _make_mask)


def hand_in(layer: nn.Module, argument: int | str) -> None:
    """Register a hook that passes a `Mask` instead of None, so that any use of the mask raises.

    A trace must not build masks: it would record Hugging Face's search for packed sequences.
    """

    def put(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = dict(enumerate(args)) | kwargs
        if arguments.get(argument) is not None:
            return None
        if isinstance(argument, str):
            return args, kwargs | {argument: _TRACED}
        return (*args[:argument], _TRACED, *args[argument + 1 :]), kwargs

    layer.register_forward_pre_hook(put, with_kwargs=True)


_TRACED = Mask(lambda *_: torch.empty(0), custom=True, sizes=())


def masks_in(value: Any) -> Iterator[Mask]:
    """Yield every mask in an argument of a layer."""
    if isinstance(value, Mask):
        yield value
    elif isinstance(value, dict):
        yield from masks_in(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from masks_in(item)


def meaning_of(plain: Mask, packed: Mask, positions: torch.Tensor, where: str) -> Meaning:
    """Return the meaning of a mask.

    `plain` was built for consecutive positions, `packed` for `positions`, which restart.
    """
    window = _window_of(plain, where)
    places = torch.arange(len(positions), device=positions.device)
    alone = _causal(places, places, window)
    row = (positions.diff(prepend=positions[:1] - 1) != 1).cumsum(0)
    apart = alone & (row[:, None] == row)
    table = _tabulated(packed, places, where)
    splits = frozenset(
        value for value, expected in ((False, alone), (True, apart)) if torch.equal(table, expected)
    )
    if not splits:
        raise _refused("a mask that treats packed sequences in an unknown way", where)
    return Meaning(window, splits)


def agreed_split(meanings: Iterable[Meaning], where: str) -> bool:
    """Return whether the masks separate packed sequences; all layers must agree."""
    splits = frozenset({True, False}).intersection(*(meaning.splits for meaning in meanings))
    if not splits:
        raise UnsupportedError(
            "Some layers separate packed sequences and others do not",
            where=where,
            expected="masks that are all made with position_ids, or all without",
        )
    return True in splits


def _make_mask(
    *,
    mask_function: Callable[..., torch.Tensor],
    use_vmap: bool,
    config: Any,
    local_size: int | None = None,
    **_: Any,
) -> Mask:
    """Return a `Mask` in place of `eager_mask`.

    Shells run without padding, so the other arguments have no effect.
    """
    names = ("sliding_window", "attention_chunk_size")
    sizes = [(name, getattr(config, name, None)) for name in names]
    if local_size is not None and local_size not in [size for _, size in sizes]:
        sizes.append(("local_size", local_size))
    known = tuple((name, size) for name, size in sizes if type(size) is int and size > 0)
    return Mask(mask_function, use_vmap, known)


def _window_of(mask: Mask, where: str) -> int | None:
    """Return the window whose causal mask equals this mask."""
    if mask.custom:
        raise _refused("a custom mask function (or_mask_function or and_mask_function)", where)
    places = _sample([size for _, size in mask.sizes])
    table = _tabulated(mask, places, where)
    for window in (None, *(size for _, size in mask.sizes)):
        if torch.equal(table, _causal(places, places, window)):
            return window
    raise _refused(_counterexample(table, places, mask), where)


def _causal(queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
    """Return the boolean mask [queries, keys] of `tpc.attention` for this window."""
    distance = queries[:, None] - keys
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def _sample(sizes: list[int]) -> torch.Tensor:
    """Return indices near 0, powers of two and multiples of `sizes`, and random others."""
    powers = [2**power for power in range(4, 22)]
    corners = [
        *powers,
        *(size * factor for size in sizes for factor in (1, 2, 3)),
        *(power - size for size in sizes for power in powers),
    ]
    chosen = {corner + near for corner in corners for near in range(-2, 3)}
    random_indices = torch.randint(2**21, (64,), generator=torch.Generator("cpu").manual_seed(0))
    chosen.update(range(20), random_indices.tolist())
    return torch.tensor(sorted(place for place in chosen if place >= 0), device="cpu")


def _tabulated(mask: Mask, places: torch.Tensor, where: str) -> torch.Tensor:
    """Evaluate the mask at these indices to a boolean [queries, keys], as Hugging Face does."""
    first = torch.zeros(1, 1, 1, 1, dtype=torch.long, device="cpu")
    queries, keys = places[None, None, :, None], places[None, None, None, :]
    try:
        visible = mask.function(first, first, queries, keys)
        values: torch.Tensor = visible.expand(1, 1, len(places), len(places))[0, 0]
        if values.dtype == torch.bool and values.device == places.device:
            return values
    except Exception as error:  # the model's function may raise anything
        raise _refused(_data_dependent(mask), where) from error
    raise _refused(_data_dependent(mask), where)


def _data_dependent(mask: Mask) -> str:
    return "a mask that depends on more than token indices" + _settings(mask)


def _counterexample(table: torch.Tensor, places: torch.Tensor, mask: Mask) -> str:
    causal = _causal(places, places, None)
    later = table & ~causal
    differs = later if bool(later.any()) else table != causal
    query, key = (int(places[index]) for index in differs.nonzero()[0])
    told = "attends to" if bool(later.any()) else "does not attend to"
    return f"a mask in which token {query} {told} token {key}" + _settings(mask)


def _settings(mask: Mask) -> str:
    sizes = ", ".join(f"{name}={size}" for name, size in mask.sizes)
    return f" ({sizes})" if sizes else ""


def _refused(got: str, where: str) -> UnsupportedError:
    return UnsupportedError(
        "The attention mask of a layer cannot be compiled",
        where=where,
        got=got,
        expected=_EXPECTED,
    )


def _changed(operation: str) -> UnsupportedError:
    return UnsupportedError(
        "The model computes with its attention mask",
        got=f"a use of {operation}",
        expected="a mask that is passed unchanged from Hugging Face's mask functions to attention",
    )
