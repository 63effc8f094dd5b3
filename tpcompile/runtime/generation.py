"""Greedy decoding that takes tokens from the ranks, without gathering logits."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from tpcompile.backends.executor import OnTokens
from tpcompile.errors import CheckpointError
from tpcompile.frontend import Captured
from tpcompile.json_files import read_object, shortened
from tpcompile.runtime.checkpoint import CheckpointFiles
from tpcompile.runtime.launches import stop_tokens
from tpcompile.runtime.weights import GENERATION_CONFIG, Weights


@dataclass
class GreedyOutput(CausalLMOutputWithPast):
    """The output of a greedy step: the best tokens, without logits."""

    tokens: torch.Tensor | None = None
    """int64 [batch]: the token that follows each sequence."""


def generation_config_of(captured: Captured, weights: Weights) -> GenerationConfig:
    """Return the model's generation config, else the checkpoint's, else the configuration's."""
    config: GenerationConfig | None = getattr(captured.model, "generation_config", None)
    if config is not None:
        return copy.deepcopy(config)
    if isinstance(weights, CheckpointFiles) and (weights.directory / GENERATION_CONFIG).is_file():
        return _stored_config(weights.directory)
    return GenerationConfig.from_model_config(captured.config)


def _stored_config(directory: Path) -> GenerationConfig:
    """Load the checkpoint's generation configuration: plain data that cannot name code to run."""
    file = directory / GENERATION_CONFIG
    try:
        read_object(file)
        return GenerationConfig.from_pretrained(directory)
    except Exception as error:  # reading, parsing and validating raise different errors
        raise CheckpointError(
            "The generation configuration cannot be read",
            where=str(file),
            got="the error: "
            + shortened(next(iter(str(error).splitlines()), type(error).__name__)),
            hint="Correct the file, or remove it to use the config.json instead",
        ) from error


def without_sampling(config: GenerationConfig) -> GenerationConfig:
    """Return a generation configuration with only the special tokens of another one."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    config_class: Any = GenerationConfig
    special: GenerationConfig = config_class(**{name: getattr(config, name) for name in names})
    return special


def _put_in(streamer: Any, padding: torch.Tensor | None) -> OnTokens:
    """Return a callback that passes tokens to a streamer, with padding after the end."""

    def put(tokens: torch.Tensor) -> None:
        streamer.put(tokens if padding is None else torch.where(tokens < 0, padding.cpu(), tokens))

    return put


def decode_greedily(
    model: Any,
    input_ids: torch.Tensor,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any,
    **model_kwargs: Any,
) -> torch.Tensor:
    """Run Hugging Face's loop for `do_sample=False` on tokens instead of logits.

    A program runs several steps per launch if no Python code decides after each token. A streamer
    receives each token as soon as it is known.
    """
    stops = stop_tokens(stopping_criteria)
    lengths = [
        criterion.max_length for criterion in stopping_criteria if hasattr(criterion, "max_length")
    ]
    most = min(lengths, default=generation_config.max_length)
    stops_at_eos = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    unfinished = torch.ones(len(input_ids), dtype=torch.long, device=input_ids.device)
    padding = generation_config._pad_token_tensor
    model_kwargs["greedy"] = True
    outputs = model._prefill(input_ids, generation_config, model_kwargs)
    launched, streamed = outputs.tokens[None], False
    while unfinished.any():
        for tokens in launched.to(input_ids.device):
            model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
            if stops_at_eos:
                tokens = tokens * unfinished + padding.to(tokens.device) * (1 - unfinished)
            input_ids = torch.cat([input_ids, tokens[:, None]], dim=-1)
            if streamer is not None and not streamed:
                streamer.put(tokens)
            unfinished = unfinished & ~stopping_criteria(input_ids, None)
            if not unfinished.any():
                break
        else:
            inputs = model.prepare_inputs_for_generation(
                input_ids, next_sequence_length=1, **model_kwargs
            )
            steps = model.steps_ahead(inputs, stops, most - input_ids.shape[1])
            streamed = steps > 1
            if streamed:
                on_tokens = None if streamer is None else _put_in(streamer, padding)
                launched = model.launch(inputs, unfinished == 0, steps, stops, on_tokens)
            else:
                launched = model(**inputs, return_dict=True).tokens[None]
    if streamer is not None:
        streamer.end()
    return input_ids
