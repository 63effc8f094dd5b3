"""Ask a server for completions. It imports little, since a test runs it in an interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx

PROMPTS = [[1, 2, 3], list(range(40, 100)), [7]]


def continued(url: str, post: Callable[..., Any] = httpx.post) -> list[list[int]]:
    """Return the new tokens of all prompts. The server has no tokenizer, so they are named."""
    body = {"prompt": PROMPTS, "max_tokens": 6, "seed": 5, "logprobs": 0, "ignore_eos": True}
    answer = post(f"{url}/v1/completions", json=body, timeout=240).json()
    return [
        [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]]
        for choice in answer["choices"]
    ]
