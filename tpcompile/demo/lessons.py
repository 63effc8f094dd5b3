"""What the demo model with tools learns from: its tokenizer, and batches of chats and stories."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tpcompile.demo.chats import Sample, samples
from tpcompile.demo.template import TEMPLATE
from tpcompile.demo.text import all_sentences

VOCABULARY = 1999
"""The vocabulary. It has a token for most words, and is prime, so no tp divides it."""

END, PAD = "<|im_end|>", "<|pad|>"
ENDS = (END, "<|endoftext|>")
"""The ends of an answer, and of a text without a chat."""
ANSWER = "<|im_start|>assistant\n"
SPECIAL = ("<|endoftext|>", "<|im_start|>", END, PAD)
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
THINKING = ("<think>", "</think>")
"""Tokens that a decoded text shows, as those of Qwen3."""

TOKENS = 1100
"""The tokens of a batch, at most, unless it is a single chat."""
POOL = 100
"""Chats that are drawn at once and then sorted by length, so that rows need little padding."""
IGNORED = -100
"""The label of tokens that are not learned."""
CUTS = ("\n</think>\n\n", "</think>\n\n", "</think>")


class Batch(NamedTuple):
    """Token ids, and the ids that are learned at their places."""

    ids: torch.Tensor
    labels: torch.Tensor


def tools_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-pair tokenizer on stories and chats, with Qwen3's tokens of chats.

    A name, and a number below 100, is the same token after a space and after a quote, so that it
    is easy to copy.
    """
    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,2}"), "isolated"),
            pre_tokenizers.Split(Regex(r"\p{Lu}\p{Ll}+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    pairs.decoder = decoders.ByteLevel()
    marks = [AddedToken(text, special=False, normalized=False) for text in (*MARKS, *THINKING)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(marks),
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    untrained = _wrapped(pairs)
    chats = [_prompt(untrained, chat) + _completion(chat) for chat in islice(samples(0), 4000)]
    texts = all_sentences()
    pairs.train_from_iterator([*texts, *(f" {text}" for text in texts), *chats], trainer)
    pairs.add_tokens(marks)
    return _wrapped(pairs)


def _wrapped(pairs: Tokenizer) -> PreTrainedTokenizerFast:
    wrapped: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=pairs, eos_token=END, pad_token=PAD, model_max_length=2048
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def chat_batches(
    tokenizer: PreTrainedTokenizerFast, seed: int, short: bool = False
) -> Iterator[Batch]:
    """Yield batches of chats. Only what the model writes is learned."""
    draw = random.Random(seed)
    chats = samples(seed, short)
    while True:
        pool = [_row(tokenizer, chat, draw) for chat in islice(chats, POOL)]
        batches: list[list[_Row]] = [[]]
        for row in sorted(pool, key=lambda row: len(row.ids)):
            if batches[-1] and (len(batches[-1]) + 1) * len(row.ids) > TOKENS:
                batches.append([])
            batches[-1].append(row)
        draw.shuffle(batches)
        for rows in batches:
            yield _padded(rows, tokenizer.pad_token_id)


@dataclass(frozen=True)
class _Row:
    """The token ids of a chat, and whether each is learned."""

    ids: list[int]
    learned: list[bool]

    def add(self, ids: list[int], learned: bool) -> None:
        self.ids.extend(ids)
        self.learned.extend([learned] * len(ids))


def _row(tokenizer: PreTrainedTokenizerFast, chat: Sample, draw: random.Random) -> _Row:
    """Return the tokens of a chat. Earlier answers are learned too, from their second token on.

    Their first one is not what the model writes after the prompt of a generation, since a history
    has no thoughts.
    """

    def encode(text: str) -> list[int]:
        return list(tokenizer.backend_tokenizer.encode(text).ids)

    prompt, completion = _prompt(tokenizer, chat), _completion(chat)
    if chat.thinking and draw.random() < 0.15:  # thoughts that a budget has cut off
        words = chat.thoughts.split(" ")
        begun = " ".join(words[: draw.randrange(len(words))])
        prompt, completion = prompt + "<think>\n" + begun + draw.choice(CUTS), chat.answer + END
    before, *answers, opened = prompt.split(ANSWER)
    row = _Row([], [])
    row.add(encode(before), False)
    for answer in answers:
        text, _, after = answer.partition(END)
        first, *others = encode(text + END)
        row.add([*encode(ANSWER), first], False)
        row.add(others, True)
        row.add(encode(after), False)
    row.add(encode(ANSWER + opened), False)
    row.add(encode(completion), True)
    return row


def _prompt(tokenizer: Any, chat: Sample) -> str:
    return str(
        tokenizer.apply_chat_template(
            chat.messages,
            tools=chat.tools or None,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=chat.thinking,
        )
    )


def _completion(chat: Sample) -> str:
    thoughts = f"<think>\n{chat.thoughts}\n</think>\n\n" if chat.thinking else ""
    return thoughts + chat.answer + END


def _padded(rows: list[_Row], pad: int) -> Batch:
    length = max(len(row.ids) for row in rows)
    ids = torch.full((len(rows), length), pad)
    labels = torch.full((len(rows), length), IGNORED)
    for number, row in enumerate(rows):
        tokens, learned = torch.tensor(row.ids), torch.tensor(row.learned)
        ids[number, : len(tokens)] = tokens
        labels[number, : len(tokens)] = tokens.where(learned, torch.tensor(IGNORED))
    return Batch(ids, labels)
