"""A small model with a tokenizer and a chat template, with weights from a seed."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from tpcompile.demo.model import demo_config, demo_tokenizer

TEMPLATE = "{% for turn in messages %}{{ turn['role'] }}: {{ turn['content'] }} {% endfor %}"


def talker() -> tuple[Any, Any]:
    """Return the model and its tokenizer. The model never ends an answer by itself."""
    tokenizer = demo_tokenizer()
    tokenizer.chat_template = TEMPLATE
    config = demo_config(tokenizer)
    config.eos_token_id, config.initializer_range = None, 0.3
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).eval(), tokenizer
