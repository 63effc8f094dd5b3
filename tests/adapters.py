"""LoRA adapters that peft makes, with random matrices, and the models that it merges."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM


def base_model(config: Any, directory: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Save a model with random weights; return its directory."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # no norm or bias is all ones or zeros
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(directory)
    return directory


def adapter(base: Path, directory: Path, seed: int = 1, **options: Any) -> Path:
    """Save an adapter of a model, whose random A and B change it much; return its directory."""
    model = AutoModelForCausalLM.from_pretrained(base)
    with _of_peft():
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    adapted.save_pretrained(directory)
    return directory


def merged_model(base: Path, directory: Path, dtype: torch.dtype | None = None) -> Any:
    """Return the model that peft merges an adapter into."""
    options = {"attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, **options)
    with _of_peft():
        return PeftModel.from_pretrained(model, directory).merge_and_unload().eval()


@contextmanager
def _of_peft() -> Iterator[None]:
    """Ignore peft's use of what transformers deprecates."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*is_gradient_checkpointing", category=FutureWarning
        )
        yield
