"""Hugging Face's own `generate` gives the same text with a paged cache as with its own cache."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from tests.runtime.slots import BLOCK, Slots
from tpcompile.runtime.cache_name import CACHE, given_cache
from tpcompile.runtime.kv.blocks import BlockPool
from tpcompile.runtime.kv.cache import PagedCache


class Replay(Qwen3ForCausalLM):
    """Model that reads all tokens of a row back through the cache in each step."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        self.pool = BlockPool(BLOCK)
        self.slots = Slots()

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any
    ) -> None:
        if model_kwargs.get(CACHE) is None:
            model_kwargs[CACHE] = PagedCache(self.pool, 1, 256)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        past = given_cache({"past_key_values": past_key_values, "cache": cache})
        new = input_ids.shape[1]
        if attention_mask is None:
            columns = past.get_seq_length() + new
            attention_mask = torch.ones(len(input_ids), columns, dtype=torch.long)
        real = attention_mask[:, -new:].bool()
        with past.append(real) as appended:
            self.slots.run(appended, input_ids[real].tolist())
            whole = torch.zeros_like(attention_mask)
            whole[attention_mask.bool()] = torch.tensor(list(chain(*self.slots.rows(appended))))
        positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
        logits = (
            super()
            .forward(
                input_ids=whole,
                attention_mask=attention_mask,
                position_ids=positions,
                use_cache=False,
            )
            .logits[:, -new:]
        )
        return CausalLMOutputWithPast(logits=logits[:, -logits_to_keep:], **{CACHE: past})


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    config = Qwen3Config(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    eager = AutoModelForCausalLM.from_config(config).eval()
    replay = Replay(config).eval()
    replay.load_state_dict(eager.state_dict())
    return eager, replay


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3, "num_return_sequences": 2},
        {"num_beams": 4, "do_sample": True},
        {"do_sample": True, "num_return_sequences": 3},
        {"prompt_lookup_num_tokens": 3},
        {"assistant_model": None},
        {"prefill_chunk_size": 2},
    ],
    ids=["greedy", "beams", "sampled beams", "samples", "prompt lookup", "assistant", "chunks"],
)
def test_generate_goes_the_way_it_goes_with_hugging_faces_cache(
    models: tuple[Any, Any], options: dict[str, Any]
) -> None:
    ids = torch.tensor([[0, 0, 0, 7, 8, 7], [1, 2, 3, 1, 2, 3]])
    mask = (ids > 0).long()
    assisted = "prompt_lookup_num_tokens" in options or "assistant_model" in options
    if assisted:
        ids, mask = ids[1:], mask[1:]
    outputs = []
    for model in models:
        torch.manual_seed(1)
        if "assistant_model" in options:
            options = {"assistant_model": model}  # the model itself: two caches share one pool
        outputs.append(
            model.generate(ids, attention_mask=mask, max_new_tokens=12, pad_token_id=0, **options)
        )
    assert models[1].pool.used == 0
    assert outputs[0].tolist() == outputs[1].tolist()
