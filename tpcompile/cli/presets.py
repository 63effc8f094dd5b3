"""`tpcompile presets`: the official configurations that need no download."""

from __future__ import annotations

import argparse
from typing import Any

from tpcompile.cli.command import Command, Parser, Result, json_text
from tpcompile.presets import PRESETS, preset

_EXAMPLES = """\
  tpcompile presets
  tpcompile presets --json
  tpcompile plan preset:qwen3-8b --tp 2

A preset is a configuration without weights: write preset:NAME in place of
MODEL. Commands that run a model also need --random-weights SEED."""

_COLUMNS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "heads": "num_attention_heads",
    "kv heads": "num_key_value_heads",
    "vocabulary": "vocab_size",
}


def _add_arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _run(args: argparse.Namespace) -> Result:
    found = {name: preset(name) for name in PRESETS}
    if args.json:
        return Result(json_text({"presets": [{"name": n, **found[n]} for n in found]}))
    rows = [["preset", "parameters", *_COLUMNS]]
    rows += [[name, *_row(config)] for name, config in found.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return Result("".join(_line(row, widths) for row in rows))


def _row(config: dict[str, Any]) -> list[str]:
    return [_short(parameters(config)), *(f"{config[key]:,}" for key in _COLUMNS.values())]


def _line(row: list[str], widths: list[int]) -> str:
    first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
    return "  ".join([first.strip().ljust(widths[0]), *others]) + "\n"


def parameters(config: dict[str, Any]) -> int:
    """Return the number of parameters of a Qwen2, Qwen3 or Qwen3.5 configuration."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    attentions = layers // config.get("full_attention_interval", 1)
    mixers = attentions * _attention(config)
    if attentions < layers:
        mixers += (layers - attentions) * _linear_attention(config)
    others = 3 * hidden * config["intermediate_size"] + 2 * hidden
    tables = 1 if config["tie_word_embeddings"] else 2
    return int(mixers + layers * others + tables * config["vocab_size"] * hidden + hidden)


def _attention(config: dict[str, Any]) -> int:
    hidden, kind = config["hidden_size"], config["model_type"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim", hidden // heads)
    gates = heads if kind == "qwen3_5_text" else 0
    rows = (heads + gates + 2 * kv_heads) * width
    biases = rows if kind == "qwen2" else 2 * width  # others: norms of heads
    return int(hidden * (rows + heads * width) + biases)


def _linear_attention(config: dict[str, Any]) -> int:
    heads, width = config["linear_num_value_heads"], config["linear_value_head_dim"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    channels = 2 * keys + heads * width
    projections = config["hidden_size"] * (channels + 2 * heads * width + 2 * heads)
    return int(projections + channels * config["linear_conv_kernel_dim"] + 2 * heads + width)


def _short(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.2f} M"


COMMAND = Command("list the official configurations", _EXAMPLES, _add_arguments, _run)
