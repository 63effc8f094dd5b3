"""Resolving MODEL: a model in memory, a configuration, a preset, a directory or a hub id."""

from __future__ import annotations

import copy
import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tpcompile.errors import CaptureError, CompileError, UnsupportedError, UsageError
from tpcompile.frontend.features import refuse_features
from tpcompile.frontend.gguf_config import gguf_config
from tpcompile.frontend.paths import no_model
from tpcompile.gguf import is_gguf
from tpcompile.hub import unreachable
from tpcompile.json_files import JsonError, read_object, shortened
from tpcompile.presets import check_model_name, preset

log = logging.getLogger(__name__)

_BUILT_IN = (None, "eager", "sdpa")
"""Attention implementations that need no code from outside transformers and torch."""


def module_of(model: Any, dtype: torch.dtype | None) -> Any:
    """Return the user's model, or build a model without storage from a configuration."""
    if not isinstance(model, nn.Module):
        module = _empty_model(config_of(model), dtype)
        _refuse_unsupported(module)
        return module
    _refuse_unsupported(model)
    if getattr(model.config, "quantization_config", None) is not None:
        raise UnsupportedError(
            f"{type(model).__name__} is quantized",
            expected="a model in memory in float32, bfloat16 or float16",
            hint="Pass the directory of the checkpoint, which is read as it is stored",
        )
    if dtype is not None and dtype != next(model.parameters()).dtype:
        raise UsageError(
            "The dtype of a model in memory cannot be changed",
            got=f"dtype={dtype}",
            expected=str(next(model.parameters()).dtype),
            hint="Convert it first: model.to(dtype)",
        )
    return model


def name_of(model: Any) -> str:
    if isinstance(model, str | Path):
        text = str(model)
        if text.startswith("preset:"):
            return text.removeprefix("preset:").lower()
        return text.rstrip("/").rpartition("/")[2] if os.path.exists(text) else text
    return str(getattr(model, "model_type", type(model).__name__))


def config_of(model: Any) -> Any:
    from transformers import AutoConfig, PreTrainedConfig

    if isinstance(model, PreTrainedConfig):
        return model
    if not isinstance(model, str | Path):
        raise UsageError(
            f"MODEL cannot be a {type(model).__name__}",
            expected="a PreTrainedModel, a config, 'preset:NAME', a directory or a hub id",
        )
    text = str(model)
    if not text:
        raise UsageError("MODEL is empty", expected="a directory, a hub id or preset:NAME")
    check_model_name(text)
    if is_gguf(text):
        return gguf_config(text)
    if text.startswith("preset:"):
        return AutoConfig.for_model(**preset(text.removeprefix("preset:")))
    file = Path(text) / "config.json"
    if os.path.exists(text) and not file.is_file():
        raise no_model(Path(text))
    local = os.path.exists(text)
    offline = "" if local else unreachable(text)
    cached = {"local_files_only": bool(offline)}
    try:
        values = read_object(file) if local else PreTrainedConfig.get_config_dict(text, **cached)[0]
        _refuse_code(text, values)
        config = AutoConfig.from_pretrained(text, trust_remote_code=False, **cached)
        return _of_text_model(config)
    except CompileError:
        raise
    except Exception as error:  # reading, parsing and validating raise different errors
        if offline:
            raise CaptureError(
                f"There is no model '{shortened(text)}'",
                got=f"no such directory, no copy in the cache of the hub, and {offline}",
                expected="a directory with a config.json, a GGUF file, the id of a model on the "
                "hub, or preset:NAME, such as preset:tiny-qwen3",
            ) from error
        raise CaptureError(
            f"The configuration of '{shortened(text)}' could not be read",
            where=shortened(str(file)) if local else "",
            got=str(error) if isinstance(error, JsonError) else f"the error: {_first_line(error)}",
            hint="Correct the file, or pass another model"
            if local
            else "Check the id and your access to it, or pass a directory with a config.json",
        ) from error


_OF_CHECKPOINT = ("dtype", "quantization_config", "transformers_weights")
"""Settings of a whole checkpoint that those of its text model may lack."""


def _of_text_model(config: Any) -> Any:
    """Return the configuration of the causal LM in a checkpoint that also reads images.

    It is the one that Hugging Face's `AutoModelForCausalLM` builds.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in classes or not _reads_more_than_text(config):
        return config
    text = getattr(config, "text_config", None)
    if classes[type(config)].config_class is not type(text):
        return config
    for name in _OF_CHECKPOINT:
        value = getattr(config, name, None)
        if value is not None and getattr(text, name, None) is None:
            setattr(text, name, value)
    log.info("of a %s, only the text model is used", config.model_type)
    return text


def _refuse_code(model: str, values: dict[str, Any]) -> None:
    """Refuse a model that needs code from its repository, without running it or prompting.

    If Hugging Face has its own classes for the model type, they are used and the code is ignored.
    """
    from transformers import CONFIG_MAPPING

    kind = values.get("model_type")
    if values.get("auto_map") and not (isinstance(kind, str) and kind in CONFIG_MAPPING):
        raise UnsupportedError(
            f"{model} needs code from its repository, which tpcompile does not run",
            got=f"an auto_map, and model_type {shortened(repr(kind))}",
            expected="a model type that transformers itself supports",
        )


def _first_line(error: Exception) -> str:
    return " ".join(" ".join(str(error).split("\n", 2)[:2]).split())


def _empty_model(config: Any, dtype: torch.dtype | None) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = getattr(config, "model_type", "")
    if config.is_encoder_decoder or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnsupportedError(
            f"A model of type {kind!r} is not a decoder-only language model",
            expected="a causal LM such as Qwen2, Qwen2.5 or Qwen3",
        )
    if _reads_more_than_text(config):
        raise UnsupportedError(
            f"A model of type {kind!r} takes inputs other than text", expected=_OVER_TOKENS
        )
    wanted = dtype or getattr(config, "dtype", None) or torch.float32
    config = copy.deepcopy(config)
    if config._attn_implementation not in _BUILT_IN:  # may name hub code; ours replaces it
        config._attn_implementation = "eager"
    with torch.device("meta"):
        make: Any = AutoModelForCausalLM.from_config
        try:
            return make(config, dtype=wanted, trust_remote_code=False).eval()
        except Exception as error:  # the model's code may raise anything
            raise CaptureError(
                f"A model of type {kind!r} could not be built from this configuration",
                got=f"{type(error).__name__}: {_first_line(error)}",
                expected="a configuration that Hugging Face accepts",
            ) from error


def _refuse_unsupported(module: Any) -> None:
    name = type(module).__name__
    _refuse_other_kinds(module, name)
    refuse_features(module)
    if getattr(module, "training", False):
        raise UsageError(f"{name} is in training mode", hint="Call model.eval() first")
    if module.get_output_embeddings() is None:
        raise UnsupportedError(
            f"{name} has no language-model head", hint="Load it with AutoModelForCausalLM"
        )


def _refuse_other_kinds(module: Any, name: str) -> None:
    """Refuse modules that are not decoder-only language models over tokens."""
    from transformers import PreTrainedConfig

    if not isinstance(getattr(module, "config", None), PreTrainedConfig):
        raise UnsupportedError(
            f"{name} is not a Hugging Face model",
            expected="a PreTrainedModel such as Qwen3ForCausalLM",
        )
    if module.config.is_encoder_decoder:
        raise UnsupportedError(
            f"{name} is an encoder-decoder model", expected="a decoder-only language model"
        )
    if _reads_more_than_text(module.config):
        raise UnsupportedError(f"{name} takes inputs other than text", expected=_OVER_TOKENS)
    if getattr(module.config, "is_causal", True) is False:
        raise UnsupportedError(f"{name} is an encoder: is_causal=False", expected=_CAUSAL)
    causal = [part.is_causal for part in module.modules() if hasattr(part, "is_causal")]
    if causal and not any(causal) and getattr(module, "_supports_attention_backend", False):
        raise UnsupportedError(
            f"{name} is an encoder: its attention is not causal", expected=_CAUSAL
        )


_CAUSAL = "a decoder, in which a token attends to itself and to earlier tokens"
_OVER_TOKENS = "a causal LM over tokens, such as Qwen2, Qwen2.5 or Qwen3"


def _reads_more_than_text(config: Any) -> bool:
    return hasattr(config, "vision_config") or hasattr(config, "audio_config")
