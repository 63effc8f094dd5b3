"""The module that graphs call for the model's rotary tables."""

from __future__ import annotations

import copy
import importlib
import json
import re
from typing import Any

import torch
from torch import nn

from tpcompile.errors import UnsupportedError
from tpcompile.ir.info import RotarySource

_FREQUENCIES = "inv_freq"


def rotary_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Return the rotary modules, which store inverse frequencies, by path."""
    return {path: part for path, part in module.named_modules() if frequencies_of(part)}


def frequencies_of(part: nn.Module) -> list[str]:
    """Return the names of the inverse frequencies that a module stores, one per table."""
    if isinstance(getattr(part, _FREQUENCIES, None), torch.Tensor):
        return [_FREQUENCIES]
    per_type = (name for name in part._buffers if name.endswith(f"_{_FREQUENCIES}"))
    return [name for name in per_type if not name.endswith(f"original_{_FREQUENCIES}")]


def _tables(module: Any, like: torch.Tensor, positions: torch.Tensor) -> Any:
    """Return the tables of `positions[batch, tokens]`.

    A module with sections rotates by three positions of a token, which are the same in a text.
    """
    if hasattr(module, "mrope_section"):
        positions = positions.expand(3, -1, -1)
    return module(like, positions)


def table_feature(source: nn.Module, config: Any) -> str:
    """Return the unsupported feature of the tables of a rotary module, or ""."""
    try:
        module: Any = RotaryTables(source, config).new_module()
        frequencies = module.inv_freq
        positions = torch.arange(2, device=frequencies.device).unsqueeze(0)
        output = _tables(module, torch.empty(0, device=frequencies.device), positions)
    except Exception as error:  # Hugging Face's code may raise anything
        return f"rotary tables that depend on more than positions ({type(error).__name__})"
    tables = output if isinstance(output, tuple) else (output,)
    if any(table.is_complex() for table in tables):
        return "rotary tables of complex numbers"
    width = 2 * frequencies.shape[-1]
    widths = {table.shape[-1] for table in tables}
    if len(tables) == 2 and widths == {width // 2}:
        return "rotary tables of half the rotated width"
    if len(tables) != 2 or widths != {width}:
        return f"{len(tables)} rotary tables of widths {sorted(widths)}"
    return ""


class RotaryTables(nn.Module):
    """Module that maps `(positions, width, dtype)` to cos and sin with Hugging Face's module.

    Some rope types keep state between calls, so each rank has its own copy. Hugging Face's module
    is created on the first call: a graph that is only printed or checked does not need it.
    """

    def __init__(self, source: nn.Module, config: Any) -> None:
        super().__init__()
        frequencies: Any = source.inv_freq
        template = source if frequencies.is_meta else copy.deepcopy(source)
        self._source = (template,)  # the tuple hides it from nn.Module, so it is not moved or saved
        self._config = config
        self._module: Any = None

    def forward(
        self, positions: torch.Tensor, width: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._module is None:
            self._module = self.new_module().to(positions.device)
        like = torch.empty(0, dtype=dtype, device=positions.device)
        batch = positions if positions.dim() == 2 else positions.unsqueeze(0)
        cos, sin = _tables(self._module, like, batch)
        if cos.shape[-1] != width:
            raise ValueError(f"Rotary tables must have width {width}, got {cos.shape[-1]}")
        shape = (*positions.shape, width)
        return cos.reshape(shape), sin.reshape(shape)

    def fresh(self) -> RotaryTables:
        """Return a copy for another rank."""
        return RotaryTables(self._source[0], self._config)

    def new_module(self) -> nn.Module:
        """Create Hugging Face's module with real tensors; it may keep state between calls."""
        source: Any = self._source[0]
        if source.inv_freq.is_meta:
            module: nn.Module = type(source)(config=getattr(source, "config", self._config))
            return module
        return copy.deepcopy(self._source[0])


_ROTARY_CLASS = re.compile(r"transformers\.models\.[a-z0-9_.]+\.[A-Za-z0-9_]*RotaryEmbedding")
_VOLATILE = ("transformers_version", "_name_or_path", "architectures", "dtype", "layer_types")
"""Settings that differ between versions or directories, or that grow with the number of layers."""


def source_of(module: nn.Module, config: Any) -> RotarySource | None:
    """Return the class and settings of a rotary module, or None if it is not from transformers."""
    path = f"{type(module).__module__}.{type(module).__qualname__}"
    if not _ROTARY_CLASS.fullmatch(path):
        return None
    module_config = getattr(module, "config", config)
    settings = {k: v for k, v in module_config.to_diff_dict().items() if k not in _VOLATILE}
    return RotarySource(path, json.dumps(settings, sort_keys=True))


class SavedTables(nn.Module):
    """The rotary tables of a graph that was read from text."""

    def __init__(self, source: RotarySource | None) -> None:
        super().__init__()
        self._source = source
        self._tables: RotaryTables | None = None

    def forward(self, *args: Any) -> Any:
        if self._tables is None:
            self._tables = self._new_tables()
        return self._tables(*args)

    def _new_tables(self) -> RotaryTables:
        source = self._source
        if source is None or not _ROTARY_CLASS.fullmatch(source.path):
            raise UnsupportedError(
                "The rotary tables of this graph cannot be computed",
                got=source.path if source else "text without a line `rotary`",
                expected="the rotary class of a model in transformers",
            )
        from transformers import AutoConfig

        place, _, name = source.path.rpartition(".")
        try:
            kind = getattr(importlib.import_module(place), name)
            config = AutoConfig.for_model(**json.loads(source.config))
            return RotaryTables(kind(config=config), config)
        except Exception as error:  # Hugging Face's code may raise anything
            raise UnsupportedError(
                "The rotary tables of this graph cannot be computed",
                where=source.path,
                got=f"{type(error).__name__}: {error}",
            ) from error
