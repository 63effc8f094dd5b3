"""llama.cpp, through the C API of llama-cpp-python, which has batches."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

from benchmarks.peers.gguf_file import shared_gguf
from benchmarks.peers.kinds import Loaded, Settings, Sizes

PROMPT_TOKENS = 512
"""Tokens of a prompt per call: llama.cpp's default."""
GRANULE = 256
"""llama.cpp rounds the tokens of a sequence to this multiple."""
FILE_TYPES = {
    "int8": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "int4": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
}
"""The types of files with integers: groups of 32 columns with a scale in fp16."""


def load(settings: Settings) -> Loaded:
    """Load a GGUF file; write that of a checkpoint if no side has written it yet."""
    llama_cpp.llama_backend_init()
    source = settings.path if settings.is_file else shared_gguf(settings.path)
    path = source
    if settings.integers:
        path = quantized_gguf(source, settings.integers, settings.threads)
    model = llama_cpp.llama_model_load_from_file(
        str(path).encode(), llama_cpp.llama_model_default_params()
    )
    if not model:
        raise RuntimeError(f"llama.cpp could not load {path}")
    decoder = LlamaDecoder(model, settings, _is_exact(source))
    return Loaded(decoder, [os.getpid()], sizes=decoder.sizes(path))


def quantized_gguf(source: Path, integers: str, threads: int) -> Path:
    """Return the file of these integers beside a file in 16 or 32 bits; make it only once.

    llama.cpp chooses the types of tensors: with 4 bits, a head that is tied gets 6 bits.
    """
    path = source.with_name(f"model-{integers}.gguf")
    if not path.exists():
        parameters = llama_cpp.llama_model_quantize_default_params()
        parameters.ftype, parameters.nthread = FILE_TYPES[integers], threads
        unfinished = path.with_suffix(".part")
        code = llama_cpp.llama_model_quantize(
            str(source).encode(), str(unfinished).encode(), ctypes.byref(parameters)
        )
        if code:
            raise RuntimeError(f"llama_model_quantize returned {code} for {source}")
        unfinished.rename(path)
    return path


def _is_exact(path: Path) -> bool:
    """Return whether the embedding is in fp32, as it is in the files of models in fp32."""
    kinds = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(path).tensors}
    return bool(kinds["token_embd.weight"] == gguf.GGMLQuantizationType.F32)


class LlamaDecoder:
    """A model, and a context for the sequences."""

    def __init__(self, model: Any, settings: Settings, exact: bool) -> None:
        self._model, self._threads = model, settings.threads
        vocabulary = llama_cpp.llama_model_get_vocab(model)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._exact = exact
        self._context: Any = None
        self._past = 0

    def sizes(self, path: Path) -> Sizes:
        """Return the bytes of the tensors of the model's file, of its cache and of states."""
        reader = gguf.GGUFReader(path)
        sizes = {tensor.name: int(tensor.n_bytes) for tensor in reader.tensors}
        total = sum(sizes.values())
        tied = "output.weight" not in sizes
        layers, heads = (
            ask(self._model)
            for ask in (llama_cpp.llama_model_n_layer, llama_cpp.llama_model_n_head_kv)
        )
        read = total if tied else total - sizes["token_embd.weight"]
        # the layers between have linear attention
        interval = self._told(reader, "full_attention_interval") or 1
        values = 2 * (layers // interval) * heads * self._width(reader)
        states = (layers - layers // interval) * self._state_bytes(reader) if interval > 1 else 0
        return Sizes(total, read, values * (4 if self._exact else 2), states)

    def _state_bytes(self, reader: Any) -> int:
        """Return the bytes that a layer of linear attention keeps of a sequence, in fp32."""
        names = ("ssm.inner_size", "ssm.state_size", "ssm.group_count", "ssm.conv_kernel")
        values, width, heads, taps = (self._told(reader, name) for name in names)
        return 4 * (values * width + (taps - 1) * (values + 2 * heads * width))

    def _told(self, reader: Any, name: str) -> int:
        """Return a number of the file; 0 if it has none of this name."""
        architecture = reader.fields["general.architecture"].contents()
        field = reader.fields.get(f"{architecture}.{name}")
        return 0 if field is None else int(field.contents())

    def _width(self, reader: Any) -> int:
        """Return the width of a head. Files need not tell it."""
        if width := self._told(reader, "attention.key_length"):
            return width
        hidden = llama_cpp.llama_model_n_embd(self._model)
        return int(hidden // llama_cpp.llama_model_n_head(self._model))

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
        logits = np.empty((len(places), self._vocabulary), np.float32)
        for row, place in enumerate(places):
            pointer = llama_cpp.llama_get_logits_ith(self._context, place)
            logits[row] = np.ctypeslib.as_array(pointer, (self._vocabulary,))
        return logits
