"""A tokenizer with a word for each token, for checkpoints with random weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_LETTER = "t"


def words_of(tokens: Sequence[int]) -> str:
    """Return the text of tokens."""
    return " ".join(f"{_LETTER}{token}" for token in tokens)


def tokens_of(text: str) -> list[int]:
    """Return the tokens of a text."""
    return [int(word.removeprefix(_LETTER)) for word in text.split()]


def save_tokenizer(directory: Path, vocabulary: int) -> None:
    """Save the tokenizer beside a checkpoint."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {f"{_LETTER}{token}": token for token in range(vocabulary)}
    tokenizer = Tokenizer(WordLevel(words, unk_token=f"{_LETTER}0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
