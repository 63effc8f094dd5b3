"""A byte-level tokenizer for models without one, whose tokens cross the borders of JSON."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SIZE, END = 1013, 0
THINK_END = "</think>"
_TEXTS = (
    '{"name": "Anna", "tags": ["a", "b"], "count": 12, "next": null, "done": true}',
    '{"id":-17.5,"when":"2026-01-31","place":{"city":"Basel","unit":"kelvin"}}',
    "The grey cat of Anna sleeps. ",
    "yes no maybe red green blue ",
)


@cache
def byte_tokenizer() -> Any:
    """Return a tokenizer with fewer tokens than the model has; token 0 ends a sequence."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE - 100,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=6,
        show_progress=False,
    )
    tokenizer.train_from_iterator([text for text in _TEXTS for _ in range(5)], trainer)
    tokenizer.add_tokens([AddedToken(THINK_END, special=False, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
