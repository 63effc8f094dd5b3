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


_OF_EXPERTS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "ffn": "moe_intermediate_size",
    "experts": "num_experts",
    "chosen": "num_experts_per_tok",
}


def _add_arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _run(args: argparse.Namespace) -> Result:
    configs = {name: preset(name) for name in PRESETS}
    if args.json:
        return Result(json_text({"presets": [{"name": n, **configs[n]} for n in configs]}))
    dense = [["preset", "parameters", *_COLUMNS]]
    mixtures = [["preset", "parameters", "active", *_OF_EXPERTS]]
    for name, config in configs.items():
        if "num_experts" in config:
            mixtures.append([name, *_counts(config, _active(config)), *_row(config, _OF_EXPERTS)])
        else:
            dense.append([name, *_counts(config), *_row(config, _COLUMNS)])
    return Result(_table(dense) + "\n" + _table(mixtures))


def _counts(*configs: dict[str, Any]) -> list[str]:
    return [_short(parameters(config)) for config in configs]


def _row(config: dict[str, Any], columns: dict[str, str]) -> list[str]:
    return [f"{config[key]:,}" for key in columns.values()]


def _active(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with the experts that a token chooses as the only ones."""
    return {**config, "num_experts": config["num_experts_per_tok"]}


def _table(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join(_line(row, widths) for row in rows)


def _line(row: list[str], widths: list[int]) -> str:
    first, *following = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
    return "  ".join([first.strip().ljust(widths[0]), *following]) + "\n"


def parameters(config: dict[str, Any]) -> int:
    """Return the number of parameters of a configuration of Qwen2, Qwen3, Qwen3-Next or Qwen3.5."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    attentions = layers // config.get("full_attention_interval", 1)
    mixers = attentions * _attention(config)
    if attentions < layers:
        mixers += (layers - attentions) * _linear_attention(config)
    per_layer = _mlp(config) + 2 * hidden
    tables = 1 if config["tie_word_embeddings"] else 2
    return int(mixers + layers * per_layer + tables * config["vocab_size"] * hidden + hidden)


def _mlp(config: dict[str, Any]) -> int:
    """Return the number of parameters of an MLP, or of a router, experts and shared ones."""
    hidden = config["hidden_size"]
    if "num_experts" not in config:
        return int(3 * hidden * config["intermediate_size"])
    shared = config.get("shared_expert_intermediate_size", 0)
    expert = 3 * hidden * config["moe_intermediate_size"] + hidden  # a row of the router
    return int(config["num_experts"] * expert + (3 * shared + 1) * hidden * bool(shared))


def _attention(config: dict[str, Any]) -> int:
    hidden, kind = config["hidden_size"], config["model_type"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim", hidden // heads)
    gates = heads if "full_attention_interval" in config else 0
    rows = (heads + gates + 2 * kv_heads) * width
    biases = rows if kind.startswith("qwen2") else 2 * width  # others: norms of heads
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
