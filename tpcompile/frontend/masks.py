"""What a model's attention masks mean, asked of the masks themselves.

Eager attention takes causality and sliding windows from the mask alone, so a graph must too.
While layers are watched, Hugging Face's mask builders give a `Mask` in place of a tensor. It
carries the function of positions that the builder would have tabulated, which is compared with
what `tpc.attention` can express. Any other mask is refused, and so is any other use of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from tpcompile.errors import UnsupportedError

ATTENTION_ONLY = "tpcompile"
"""Our attention function in Hugging Face's registry; its mask builders give None for it."""
WITH_MASKS = "tpcompile, with masks"
"""The same function; Hugging Face's mask builders give a `Mask` for it."""

_EXPECTED = "a causal mask, with or without a sliding window"


@dataclass(frozen=True, eq=False)
class Mask:
    """Stands for an attention mask; models may only hand it on."""

    function: Callable[..., torch.Tensor]
    """`(batch, head, query, key)` indices to whether the query sees the key."""
    custom: bool
    """Whether the model gave a function of its own, which may hold only for scalar indices."""
    sizes: tuple[tuple[str, int], ...]
    """Settings that limit how far a token sees, by name."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _changed(name)

    def __getitem__(self, index: object) -> NoReturn:
        raise _changed("a part")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise _changed(getattr(function, "__name__", str(function)))


@dataclass(frozen=True)
class Meaning:
    """A mask as `tpc.attention` expresses it."""

    window: int | None
    """How many tokens a token sees, itself included; all before it without one."""
    splits: frozenset[bool]
    """Whether sequences packed into a row are kept apart; both fit a window of one token."""


def register(attention: Callable[..., Any]) -> None:
    """Make our attention function and our masks known to Hugging Face."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_ONLY, attention)
    ALL_ATTENTION_FUNCTIONS.register(WITH_MASKS, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(WITH_MASKS, _make_mask)


def hand_in(layer: nn.Module, argument: int | str) -> None:
    """Give a layer a `Mask` where it would be given None, to see what it does with it.

    A trace cannot make masks: it would record how Hugging Face looks for packed sequences.
    """

    def put(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(enumerate(args)) | kwargs
        if given.get(argument) is not None:
            return None
        if isinstance(argument, str):
            return args, kwargs | {argument: _TRACED}
        return (*args[:argument], _TRACED, *args[argument + 1 :]), kwargs

    layer.register_forward_pre_hook(put, with_kwargs=True)


_TRACED = Mask(lambda *_: torch.empty(0), custom=True, sizes=())


def masks_in(value: Any) -> Iterator[Mask]:
    """Every mask in an argument of a layer."""
    if isinstance(value, Mask):
        yield value
    elif isinstance(value, dict):
        yield from masks_in(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from masks_in(item)


def meaning_of(plain: Mask, packed: Mask, positions: torch.Tensor, where: str) -> Meaning:
    """What one mask means, seen with positions in order and with `positions` that start again."""
    window = _window_of(plain, where)
    places = torch.arange(len(positions), device=positions.device)
    alone = _causal(places, places, window)
    row = (positions.diff(prepend=positions[:1] - 1) != 1).cumsum(0)
    apart = alone & (row[:, None] == row)
    found = _tabulated(packed, places, where)
    splits = frozenset(
        value for value, expected in ((False, alone), (True, apart)) if torch.equal(found, expected)
    )
    if not splits:
        raise _refused("a mask that packs sequences in a way of its own", where)
    return Meaning(window, splits)


def agreed_split(meanings: Iterable[Meaning], where: str) -> bool:
    """Whether packed sequences are kept apart, which all layers must agree on."""
    splits = frozenset({True, False}).intersection(*(meaning.splits for meaning in meanings))
    if not splits:
        raise UnsupportedError(
            "Some layers keep packed sequences apart and others do not",
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
    """Take the place of `eager_mask`; shells run without padding, so nothing else matters."""
    names = ("sliding_window", "attention_chunk_size")
    sizes = [(name, getattr(config, name, None)) for name in names]
    if local_size is not None and local_size not in [size for _, size in sizes]:
        sizes.append(("local_size", local_size))
    known = tuple((name, size) for name, size in sizes if type(size) is int and size > 0)
    return Mask(mask_function, use_vmap, known)


def _window_of(mask: Mask, where: str) -> int | None:
    """The window whose causal mask this mask equals."""
    if mask.custom:
        raise _refused("a mask function of its own (or_mask_function or and_mask_function)", where)
    places = _sample([size for _, size in mask.sizes])
    found = _tabulated(mask, places, where)
    for window in (None, *(size for _, size in mask.sizes)):
        if torch.equal(found, _causal(places, places, window)):
            return window
    raise _refused(_counterexample(found, places, mask), where)


def _causal(queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
    """Which keys each query sees by the meaning of `tpc.attention`."""
    distance = queries[:, None] - keys
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def _sample(sizes: list[int]) -> torch.Tensor:
    """Indices near the start, powers of two and multiples of sizes, and others far apart."""
    powers = [2**power for power in range(4, 22)]
    corners = [
        *powers,
        *(size * factor for size in sizes for factor in (1, 2, 3)),
        *(power - size for size in sizes for power in powers),
    ]
    chosen = {corner + near for corner in corners for near in range(-2, 3)}
    others = torch.randint(2**21, (64,), generator=torch.Generator("cpu").manual_seed(0))
    chosen.update(range(20), others.tolist())
    return torch.tensor(sorted(place for place in chosen if place >= 0), device="cpu")


def _tabulated(mask: Mask, places: torch.Tensor, where: str) -> torch.Tensor:
    """Boolean [queries, keys] over these indices, as Hugging Face tabulates it."""
    first = torch.zeros(1, 1, 1, 1, dtype=torch.long, device="cpu")
    queries, keys = places[None, None, :, None], places[None, None, None, :]
    try:
        found = mask.function(first, first, queries, keys)
        values: torch.Tensor = found.expand(1, 1, len(places), len(places))[0, 0]
        if values.dtype == torch.bool and values.device == places.device:
            return values
    except Exception as error:  # the function is the model's, and raises whatever it raises
        raise _refused(_data_dependent(mask), where) from error
    raise _refused(_data_dependent(mask), where)


def _data_dependent(mask: Mask) -> str:
    return "a mask that depends on more than the places of tokens" + _settings(mask)


def _counterexample(found: torch.Tensor, places: torch.Tensor, mask: Mask) -> str:
    causal = _causal(places, places, None)
    later = found & ~causal
    differs = later if bool(later.any()) else found != causal
    query, key = (int(places[index]) for index in differs.nonzero()[0])
    told = "sees" if bool(later.any()) else "does not see"
    return f"a mask in which token {query} {told} token {key}" + _settings(mask)


def _settings(mask: Mask) -> str:
    said = ", ".join(f"{name}={size}" for name, size in mask.sizes)
    return f" ({said})" if said else ""


def _refused(got: str, where: str) -> UnsupportedError:
    return UnsupportedError(
        "The attention mask of a layer cannot be compiled",
        where=where,
        got=got,
        expected=_EXPECTED,
    )


def _changed(what: str) -> UnsupportedError:
    return UnsupportedError(
        "The model computes with its attention mask",
        got=f"a use of {what}",
        expected="a mask that goes from Hugging Face's mask functions to attention as it is",
    )
