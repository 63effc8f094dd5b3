"""A byte-level tokenizer with as many tokens as Qwen3's, made of text that this machine has.

Its merges are those of Python sources, so lengths of tokens are like those of a real tokenizer, but
not the languages. Made-up tokens fill it up.
"""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

TOKENS = 151_936
"""The rows of the head of Qwen3."""
_END = "<|im_end|>"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", _END)
_LONGEST = 128
"""The characters of a token at most, as in Qwen3."""
_READ = 24 << 20
"""The bytes of sources that the merges come from."""


def tokenizer_in(directory: Path) -> Any:
    """Return the tokenizer in a directory; make it there if it is missing."""
    if not (directory / "tokenizer.json").is_file():
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=_trained(), eos_token=_END)
        tokenizer.save_pretrained(directory)
    return AutoTokenizer.from_pretrained(directory)


def _trained() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS - len(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=_LONGEST,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sources(), trainer)
    trained = json.loads(tokenizer.to_str())["model"]
    words = dict(_made_up(trained["vocab"]))
    merges = [(first, second) for first, second in trained["merges"]]
    tokenizer.model = models.BPE(vocab=trained["vocab"] | words, merges=merges)
    tokenizer.add_special_tokens(list(_SPECIAL))
    return tokenizer


def _sources() -> Iterator[str]:
    left = _READ
    for path in sorted(Path(sysconfig.get_path("purelib")).rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        left -= len(text)
        if left < 0:
            return
        yield text


def _made_up(known: dict[str, int]) -> Iterator[tuple[str, int]]:
    """Yield words of random letters that no merge makes, as many as tokens are missing."""
    dice, words = random.Random(1), set(known)
    for token in range(len(known), TOKENS - len(_SPECIAL)):
        while (word := "".join(dice.choices(ascii_lowercase, k=dice.randint(4, 12)))) in words:
            pass
        words.add(word)
        yield word, token
