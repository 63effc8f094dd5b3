"""Tests of windows that only a mask carries, and of masks that are not supported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    create_causal_mask,
    create_chunked_causal_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

import tpcompile
from tests.captures import captured_once
from tests.models import TOLERANCE, relative_error
from tests.runtime.eager_pair import enlivened
from tpcompile.errors import CompileError, UnsupportedError
from tpcompile.frontend import capture, watch
from tpcompile.frontend.layers import find_layers
from tpcompile.frontend.masks import Mask, Meaning, agreed_split, meaning_of
from tpcompile.frontend.watch import watch_layers
from tpcompile.ir.ops import ATTENTION
from tpcompile.runtime.cache_name import CACHE

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_sliding_window": True,
    "sliding_window": 5,
    "max_window_layers": 1,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
MOE = {**TINY, "num_experts": 2, "num_experts_per_tok": 1}

FULL, SLIDING = "full_attention", "sliding_attention"


def tiny(kind: str = "qwen3", **changes: Any) -> Any:
    """Return a tiny eager model with spread-out weights; changes may set a window per layer."""
    base = MOE if kind == "qwen2_moe" else TINY
    if kind == "qwen3":
        base = {**base, "head_dim": 8}
    return enlivened(AutoConfig.for_model(kind, **{**base, **changes}))


def windows(model: Any) -> list[int | None]:
    """Return the window of each layer in the captured graph."""
    graph = captured_once(model).graph.graph
    return [node.args[5] for node in graph.nodes if node.target is ATTENTION]


def masks(model: Any) -> list[int | None]:
    """Return the window that each layer's mask implies, without tracing."""
    read = watch.watch_layers(model, find_layers(model)).masks
    return [meaning.window for meaning in read if meaning is not None]


def assert_as_eager(model: Any, tp: int) -> None:
    """Compare with eager on a prompt longer than the window, then on single tokens."""
    ids = torch.randint(1, 97, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode(), tpcompile.compile(model, tp=tp, simulate=True) as compiled:
        for options in ({"use_cache": False}, {}):
            expected = model(ids, **options).logits
            assert relative_error(compiled(ids, **options).logits, expected) < TOLERANCE
        eager_cache = model(ids[:, :14], use_cache=True).past_key_values
        cache = compiled(ids[:, :14], use_cache=True).past_key_values
        for column in range(14, 20):
            token = ids[:, column : column + 1]
            expected = model(token, **{CACHE: eager_cache}).logits
            logits = compiled(token, past_key_values=cache).logits
            assert relative_error(logits, expected) < TOLERANCE


@dataclass(frozen=True)
class Case:
    """A model, changes to its configuration after construction, and its windows."""

    kind: str
    made: dict[str, Any]
    windows: list[int | None]
    changed: dict[str, Any] = field(default_factory=dict)

    def model(self) -> Any:
        model = tiny(self.kind, **self.made)
        for name, value in self.changed.items():
            setattr(model.config, name, value)
        return model


DENSE = {"mlp_only_layers": [0, 1]}
ALTERNATING = {"layer_types": [SLIDING, FULL]}
MIXED = {"num_hidden_layers": 4, "layer_types": [FULL, SLIDING, SLIDING, FULL]}

CASES = {
    "only in the mask": Case("qwen2_moe", DENSE | ALTERNATING, [5, None]),
    "only in the mask, by step": Case("qwen2_moe", {"decoder_sparse_step": 5}, [5, None]),
    "only in the mask, every layer": Case(
        "qwen2_moe", DENSE | {"layer_types": [SLIDING] * 2}, [5, 5]
    ),
    "mixed qwen2": Case("qwen2", MIXED, [None, 5, 5, None]),
    "mixed qwen3": Case("qwen3", MIXED, [None, 5, 5, None]),
    "no window, qwen2": Case("qwen2", {"use_sliding_window": False}, [None, None]),
    "no window, qwen3": Case("qwen3", {"use_sliding_window": False}, [None, None]),
    "a mask with window 0 that no layer gets": Case(
        "qwen2_moe", DENSE | {"use_sliding_window": False}, [None, None]
    ),
    "window changed, qwen2": Case("qwen2", ALTERNATING, [9, None], {"sliding_window": 9}),
    "window changed, qwen3": Case("qwen3", ALTERNATING, [9, None], {"sliding_window": 9}),
    "window changed, mistral": Case("mistral", {}, [9, 9], {"sliding_window": 9}),
    "layer types changed": Case("qwen3", ALTERNATING, [None, 5], {"layer_types": [FULL, SLIDING]}),
}
QUICK = {("only in the mask", 2), ("window changed, qwen3", 1), ("layer types changed", 2)}


@pytest.mark.parametrize("case", CASES)
def test_windows_are_those_of_the_masks(case: str) -> None:
    """Masks follow the configuration at compile time."""
    assert masks(CASES[case].model()) == CASES[case].windows


@pytest.mark.parametrize(
    ("case", "tp"),
    [
        pytest.param(case, tp, marks=[] if (case, tp) in QUICK else pytest.mark.slow)
        for case in CASES
        for tp in (1, 2)
    ],
)
@pytest.mark.usefixtures("captured_once")
def test_windows_as_in_eager(case: str, tp: int) -> None:
    """Windows come from the masks; arguments of the attention call may be missing or outdated."""
    model = CASES[case].model()
    assert windows(model) == CASES[case].windows
    assert_as_eager(model, tp)


def test_a_window_that_the_changed_config_no_longer_has() -> None:
    """Removing the window of a sliding layer is refused; eager raises as well."""
    model = tiny(layer_types=[SLIDING, FULL])
    model.config.sliding_window = None
    with pytest.raises(CompileError, match="sliding_window"):
        capture(model)


@pytest.mark.parametrize("window", [0, -3])
def test_windows_that_are_not_positive(window: int) -> None:
    model = tiny(layer_types=[FULL, SLIDING])
    model.config.sliding_window = window
    with pytest.raises(UnsupportedError, match=r"At \w+\.model\.layers\.1\. Found a mask in which"):
        capture(model)


def test_masks_are_read_once_not_once_per_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def counted(plain: Mask, packed: Mask, positions: torch.Tensor, where: str) -> Meaning:
        read.append(where)
        return meaning_of(plain, packed, positions, where)

    monkeypatch.setattr(watch, "meaning_of", counted)
    model = tiny(num_hidden_layers=12, layer_types=[FULL, SLIDING] * 6)
    layers = watch.watch_layers(model, find_layers(model))
    assert [mask and mask.window for mask in layers.masks] == [None, 5] * 6
    assert read == [f"{type(model).__name__}.model.layers.{layer}" for layer in (0, 1)]
    assert layers.traced() == (0, 1)


class OwnLoop(Qwen3Model):
    """Qwen3 whose layers receive the masks that `mask_for` returns."""

    def forward(self, input_ids: Any, position_ids: Any = None, **options: Any) -> Any:
        hidden = self.embed_tokens(input_ids)
        tables = self.rotary_emb(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(
                hidden,
                attention_mask=self.mask_for(hidden, position_ids),
                position_embeddings=tables,
                **{k: v for k, v in options.items() if k == "starts"},
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


def with_masks(make: Callable[..., Any], **settings: Any) -> Any:
    """Return a model with its own layer loop, in which `make` creates the mask of each layer."""
    model = tiny(use_sliding_window=False)
    vars(model.config).update(settings)
    model.model.__class__ = type("OwnMasks", (OwnLoop,), {"mask_for": make})
    return model


def made_with(**options: Any) -> Callable[..., Any]:
    return lambda self, hidden, positions: create_causal_mask(
        self.config, hidden, None, None, position_ids=positions, **options
    )


def seen_later(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key >= query


REFUSED: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "chunked": (
        lambda self, hidden, positions: create_chunked_causal_mask(self.config, hidden, None, None),
        {"attention_chunk_size": 4},
        "attention_chunk_size=4",
    ),
    "bidirectional": (made_with(), {"is_causal": False}, "is_causal=False"),
    "custom or": (made_with(or_mask_function=seen_later), {}, "or_mask_function"),
    "custom and": (made_with(and_mask_function=seen_later), {}, "and_mask_function"),
    "blocks": (
        made_with(block_sequence_ids=torch.zeros(1, 7, dtype=torch.long)),
        {},
        "more than token indices",
    ),
    "none": (lambda *_: None, {}, "no mask"),
    "a custom tensor": (
        lambda self, hidden, _: hidden.new_zeros(1, 1, 1, 1),
        {},
        "that the model built itself",
    ),
    "changed": (
        lambda *inputs: torch.ones(1) * made_with()(*inputs),
        {},
        "computes with its attention mask",
    ),
    "sliced": (lambda *inputs: made_with()(*inputs)[:, 0], {}, "computes with its attention mask"),
    "asked": (lambda *inputs: made_with()(*inputs).dtype, {}, "computes with its attention mask"),
    "several": (lambda *inputs: (made_with()(*inputs), made_with()(*inputs)), {}, "several"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_masks_that_are_refused(case: str) -> None:
    make, settings, message = REFUSED[case]
    model = with_masks(make, **settings)
    implementation = model.config._attn_implementation
    with pytest.raises(UnsupportedError, match=message):
        capture(model)
    assert model.config._attn_implementation == implementation


def test_a_model_of_its_own_with_a_plain_mask() -> None:
    assert windows(with_masks(made_with())) == [None, None]


def test_bidirectional_in_the_config() -> None:
    """A bidirectional configuration changes only Hugging Face's masks, and is refused."""
    model = tiny(use_sliding_window=False)
    model.config.is_causal = False
    with pytest.raises(UnsupportedError, match="token 0 attends to token 1"):
        watch_layers(model, find_layers(model))
    with pytest.raises(UnsupportedError, match="is_causal=False"):
        capture(model)


POSITIONS = torch.tensor([0, 1, 2, 0, 1])


def mask(function: Callable[..., Any], *sizes: int) -> Mask:
    return Mask(function, False, tuple(("sliding_window", size) for size in sizes))


def meaning(function: Callable[..., Any], *sizes: int) -> Meaning:
    """Return the meaning of a mask in which packed sequences are visible to each other."""
    layer_mask = mask(function, *sizes)
    return meaning_of(layer_mask, layer_mask, POSITIONS, "here")


@pytest.mark.parametrize("window", [2, 7, 4096, 32_768, 131_072])
def test_windows_of_every_size(window: int) -> None:
    assert meaning(sliding_window_causal_mask_function(window), window).window == window
    assert meaning(causal_mask_function, window).window is None


def test_a_window_of_one_token_fits_packing_and_none() -> None:
    assert meaning(sliding_window_causal_mask_function(1), 1).splits == {True, False}
    assert meaning(sliding_window_causal_mask_function(2), 2).splits == {False}


@pytest.mark.parametrize(
    "function",
    [
        sliding_window_causal_mask_function(4097),
        sliding_window_causal_mask_function(4095),
        sliding_window_bidirectional_mask_function(4096),
        chunked_causal_mask_function(4096, torch.zeros(1, dtype=torch.long)),
        chunked_causal_mask_function(1_000_000, torch.zeros(1, dtype=torch.long)),
        and_masks(causal_mask_function, lambda batch, head, query, key: key % 7 != 3),
        and_masks(causal_mask_function, lambda batch, head, query, key: key > 0),
        lambda batch, head, query, key: key < query,
        lambda batch, head, query, key: (key <= query).float(),
        lambda batch, head, query, key: key <= query.item(),
    ],
)
def test_functions_that_are_neither_causal_nor_that_window(function: Callable[..., Any]) -> None:
    with pytest.raises(UnsupportedError, match="mask of a layer cannot be compiled"):
        meaning(function, 4096)


def test_layers_must_agree_on_packing() -> None:
    either, apart, together = (
        Meaning(None, frozenset(splits)) for splits in ({True, False}, {True}, {False})
    )
    assert agreed_split([either, apart], "") is True
    assert agreed_split([either, either], "") is True
    assert agreed_split([together, either], "") is False
    with pytest.raises(UnsupportedError, match="packed sequences"):
        agreed_split([apart, together], "layers")
