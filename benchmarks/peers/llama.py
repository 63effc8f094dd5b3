"""llama.cpp, through the C API of llama-cpp-python, which has batches."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.peers.gguf_file import shared_gguf
from benchmarks.peers.kinds import Loaded, Settings

PROMPT_TOKENS = 512
"""Tokens of a prompt per call: llama.cpp's default."""
GRANULE = 256
"""llama.cpp rounds the tokens of a sequence to this multiple."""


def load(settings: Settings) -> Loaded:
    """Write the GGUF file if no side has written it yet, and load it."""
    path = shared_gguf(settings.path)
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        str(path).encode(), llama_cpp.llama_model_default_params()
    )
    if not model:
        raise RuntimeError(f"llama.cpp could not load {path}")
    return Loaded(LlamaDecoder(model, settings), [os.getpid()])


class LlamaDecoder:
    """A model, and a context for the sequences."""

    def __init__(self, model: Any, settings: Settings) -> None:
        self._model, self._threads = model, settings.threads
        vocabulary = llama_cpp.llama_model_get_vocab(model)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._exact = "float32" in (settings.path / "config.json").read_text()
        self._context: Any = None
        self._past = 0

    def begin(self, batch: int, length: int) -> None:
        """Make a new context. Its cache is fp32 for fp32 weights, else fp16, the default."""
        if self._context is not None:
            llama_cpp.llama_free(self._context)
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = batch * -(-length // GRANULE) * GRANULE
        parameters.n_seq_max = batch
        parameters.n_threads = parameters.n_threads_batch = self._threads
        parameters.n_batch = max(PROMPT_TOKENS, batch)
        if self._exact:  # flash attention would round to fp16
            parameters.type_k = parameters.type_v = llama_cpp.GGML_TYPE_F32
            parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = llama_cpp.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise RuntimeError(f"llama.cpp made no context for {batch} x {length} tokens")
        self._past = 0

    def step(self, rows: Sequence[Sequence[int]]) -> Any:
        """Append one token to all sequences at once, or the prompts one after another."""
        if len(rows[0]) == 1:
            logits = self._decode([(row, n, self._past, True) for n, (row,) in enumerate(rows)])
        else:
            logits = np.concatenate([self._prompt(n, row) for n, row in enumerate(rows)])
        self._past += len(rows[0])
        return logits

    def numbers(self, logits: Any) -> Any:
        return logits

    def _prompt(self, sequence: int, tokens: Sequence[int]) -> Any:
        last = len(tokens) - 1
        entries = [(t, sequence, self._past + n, n == last) for n, t in enumerate(tokens)]
        for begin in range(0, len(entries), PROMPT_TOKENS):
            logits = self._decode(entries[begin : begin + PROMPT_TOKENS])
        return logits

    def _decode(self, entries: Sequence[tuple[int, int, int, bool]]) -> Any:
        """Run (token, sequence, position, whether logits are wanted). Return these logits."""
        batch = llama_cpp.llama_batch_init(len(entries), 0, 1)
        try:
            batch.n_tokens = len(entries)
            for n, (token, sequence, position, wanted) in enumerate(entries):
                batch.token[n], batch.pos[n], batch.logits[n] = token, position, wanted
                batch.n_seq_id[n], batch.seq_id[n][0] = 1, sequence
            if code := llama_cpp.llama_decode(self._context, batch):
                raise RuntimeError(f"llama_decode returned {code}")
            return self._logits([n for n, entry in enumerate(entries) if entry[3]])
        finally:
            llama_cpp.llama_batch_free(batch)

    def _logits(self, places: Sequence[int]) -> Any:
        found = np.empty((len(places), self._vocabulary), np.float32)
        for row, place in enumerate(places):
            pointer = llama_cpp.llama_get_logits_ith(self._context, place)
            found[row] = np.ctypeslib.as_array(pointer, (self._vocabulary,))
        return found
