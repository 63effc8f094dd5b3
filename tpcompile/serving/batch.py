"""Hugging Face's `generate_batch` on an engine."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Sequence
from heapq import nlargest
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig

from tpcompile.errors import UnsupportedError, UsageError
from tpcompile.runtime.kv.blocks import blocks_for
from tpcompile.runtime.model import CompiledModel
from tpcompile.serving.engine import SEQUENCES, Engine
from tpcompile.serving.memory import states_for, tokens_that_fit
from tpcompile.serving.params import SamplingParams
from tpcompile.serving.requests import Completion

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.requests import GenerationOutput

_SUPPORTED = frozenset(
    (
        *("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
        *("max_new_tokens", "min_new_tokens", "max_length", "min_length", "num_return_sequences"),
        *("eos_token_id", "pad_token_id", "bos_token_id", "use_cache", "transformers_version"),
        *("output_logits", "output_scores", "return_dict_in_generate", "_from_model_config"),
    )
)
"""The fields of a generation configuration that are supported, or have no effect here."""

_NEUTRAL = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "length_penalty", "typical_p"), 1),
    **dict.fromkeys(("encoder_repetition_penalty", "num_assistant_tokens"), 1),
}
"""The values of other fields that have no effect, besides None, False and 0."""

Requests = Sequence[tuple[Sequence[int], SamplingParams]]
"""Prompts and their options."""


def generate_batch(
    model: CompiledModel,
    inputs: Iterable[Sequence[int]],
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: Any = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    **options: Any,
) -> dict[str, GenerationOutput]:
    """Continue prompts of any lengths; return the outputs by the name of the request.

    The signature is that of Hugging Face's `generate_batch`. The requests are `req_0`, `req_1` and
    so on; with `num_return_sequences` above 1, `req_0#1` is the second continuation of the first.
    `continuous_batching_config` and `progress_bar` have no effect.
    """
    # Not every version of transformers has it here, and only this function needs it.
    from transformers.generation.continuous_batching.requests import (
        GenerationOutput,
        RequestStatus,
    )

    prompts = [[int(token) for token in prompt] for prompt in inputs]
    config: Any = copy.deepcopy(generation_config or model.generation_config)
    unused = config.update(**options)
    if unused:
        raise UsageError(f"generate_batch does not support the argument {sorted(unused)[0]}")
    _check(config)
    begun = time.perf_counter()
    outputs: dict[str, GenerationOutput] = {}
    requests = [(prompt, _params(config, len(prompt))) for prompt in prompts]
    most = _running(model, requests)
    with Engine(model, max_batch=most, kv_tokens=_kv_tokens(model, requests)) as engine:
        handles = [engine.add(prompt, params) for prompt, params in requests]
        for number, handle in enumerate(handles):
            results = [Completion(index) for index in range(handle.params.n)]
            times: list[list[float]] = [[] for _ in results]
            for event in handle:
                results[event.index].add(event)
                times[event.index].append(time.perf_counter())
            for completion in results:
                name = f"req_{number}" + (f"#{completion.index}" if completion.index else "")
                outputs[name] = GenerationOutput(
                    name,
                    list(handle.prompt),
                    completion.tokens,
                    [chosen.logprob for chosen in completion.chosen if chosen.logprob is not None],
                    status=RequestStatus.FINISHED,
                    created_time=begun,
                    lifespan=(begun, times[completion.index][-1]),
                    timestamps=times[completion.index] if record_timestamps else None,
                )
    return outputs


def _running(model: CompiledModel, requests: Requests) -> int:
    """Return the sequences that may run together: each needs states of linear attention, if any."""
    most = model.max_batch or SEQUENCES
    return min(most, sum(params.n for _, params in requests)) if model.keeps_states else most


def _kv_tokens(model: CompiledModel, requests: Requests) -> int:
    """Return the tokens of the longest requests that may run together, as far as memory allows."""
    block = model.block_size
    sizes = (
        blocks_for(min(model.max_seq_len, len(prompt) + (params.max_tokens or 0)), block) * block
        for prompt, params in requests
        for _ in range(params.n)
    )
    most = _running(model, requests)
    fit = tokens_that_fit(model, states_for(model, most))
    return max(block, min(sum(nlargest(most, sizes)), fit))


def _params(config: GenerationConfig, prompt: int) -> SamplingParams:
    """Return the options of a request from a generation configuration."""
    most = config.max_new_tokens
    if most is None:
        most = max(1, (config.max_length or 20) - prompt)
    sampled: dict[str, Any] = {}
    if config.do_sample:
        sampled = {
            "temperature": 1.0 if config.temperature is None else config.temperature,
            "top_k": config.top_k or None,
            "top_p": 1.0 if config.top_p is None else config.top_p,
            "min_p": config.min_p or 0.0,
            "seed": int(torch.randint(2**62, (1,))),
        }
    ends = config.eos_token_id
    logits = config.output_logits or config.output_scores
    return SamplingParams(
        max_tokens=most,
        min_tokens=max(config.min_new_tokens or 0, (config.min_length or 0) - prompt),
        n=config.num_return_sequences or 1,
        repetition_penalty=config.repetition_penalty or 1.0,
        stop_tokens=() if ends is None else (ends,) if isinstance(ends, int) else tuple(ends),
        ignore_eos=True,
        logprobs=0 if logits else None,
        **sampled,
    )


def _check(config: GenerationConfig) -> None:
    """Raise if the configuration has options that requests do not support."""
    for name, value in config.to_dict().items():
        if name not in _SUPPORTED and value not in (None, False, _NEUTRAL.get(name)):
            raise UnsupportedError(
                f"generate_batch does not support {name}={value!r}", hint="Use generate"
            )
