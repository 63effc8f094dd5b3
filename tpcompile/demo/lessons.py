"""Lessons of the demo model with tools: its tokenizer, chat template, batches and first weights."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import PreTrainedTokenizerFast

from tpcompile.demo.chats import SKIES, Chat, chats

VOCABULARY = 1009
"""The vocabulary, with one token per word of the chats. It is prime, so no tp divides it."""

BEGIN, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens that decoded text shows, as those of Qwen3."""

TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- tool.function.name + '(' }}
        {{- ((tool.function.parameters or {}).properties or {}) | join(', ') + ')\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' }}
    {%- if message.role == 'tool' %}
        {{- '<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- else %}
        {{- message.content or '' }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""The form of Qwen3, but tools are short, such as `get_weather(city)`, so that a chat is short."""

ROWS = 8
"""The chats of a batch."""
IGNORED = -100
"""The label of tokens that are not learned."""

EMBEDDINGS, COPIES = 0.3, 0.3
"""The standard deviation of embeddings, and the factor of what a head passes on."""


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-pair tokenizer on chats.

    What is copied, such as a name or a number, is the same token after a space and after a quote.
    """
    copied = "|".join((r"\p{N}{1,3}", r"\p{Lu}\p{Ll}+", *SKIES))
    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(copied), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    pairs.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKS),
        special_tokens=[BEGIN, END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    untrained = _wrapped(pairs)
    texts = [_text(untrained, chat) for chat in islice(chats(0), 2000)]
    numbers = [str(number) for number in range(199)] * 50  # often enough for tokens
    pairs.train_from_iterator([*texts, *numbers], trainer)
    pairs.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return _wrapped(pairs)


def _wrapped(pairs: Tokenizer) -> PreTrainedTokenizerFast:
    wrapped: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=pairs, eos_token=END, pad_token=PAD, model_max_length=2048
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def _text(tokenizer: Any, chat: Chat) -> str:
    return str(tokenizer.apply_chat_template(chat.messages, tools=chat.tools, tokenize=False))


def chat_batches(
    tokenizer: PreTrainedTokenizerFast, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield token ids and labels. Only what the assistant writes is learned."""
    opening = tokenizer.backend_tokenizer.encode(f"{BEGIN}assistant\n").ids
    source = chats(seed)
    while True:
        texts = [_text(tokenizer, chat) for chat in islice(source, ROWS)]
        rows = [row.ids for row in tokenizer.backend_tokenizer.encode_batch(texts)]
        labels = [_labels(row, opening, tokenizer.eos_token_id) for row in rows]
        yield _padded(rows, tokenizer.pad_token_id), _padded(labels, IGNORED)


def _labels(row: list[int], opening: list[int], end: int) -> list[int]:
    labels, learned = [], False
    for place, token in enumerate(row):
        labels.append(token if learned else IGNORED)
        if token == end:
            learned = False
        elif row[place + 1 - len(opening) : place + 1] == opening:
            learned = True
    return labels


def _padded(rows: list[list[int]], value: int) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True, value)


@torch.no_grad()
def prepare_to_copy(model: Any) -> None:
    """Initialize a Qwen3 so that its heads pass on the tokens that they attend to.

    The output projection of a head is the transpose of its value projection, as in the mimetic
    initialization of Trockman and Kolter (2023), and embeddings are large. With the usual weights,
    arguments are hardly copied: a third of the calls are right after as many steps.
    """
    nn.init.normal_(model.model.embed_tokens.weight, std=EMBEDDINGS)
    nn.init.constant_(model.model.norm.weight, EMBEDDINGS)  # moderate logits, as they are tied
    for layer in model.model.layers:
        attention = layer.self_attn
        nn.init.orthogonal_(attention.v_proj.weight)
        heads = attention.v_proj.weight.unflatten(0, (-1, attention.head_dim))
        values = heads.repeat_interleave(attention.num_key_value_groups, dim=0).flatten(0, 1)
        attention.o_proj.weight.copy_(COPIES * values.T)
