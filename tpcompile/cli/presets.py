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
    """Return the number of parameters of a Qwen2 or Qwen3 configuration."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim", hidden // heads)
    rows = (heads + 2 * kv_heads) * width
    biases = rows if config["model_type"] == "qwen2" else 2 * width  # qwen3: norms of heads
    layer = hidden * (rows + heads * width) + biases + 3 * hidden * ffn + 2 * hidden
    tables = 1 if config["tie_word_embeddings"] else 2
    vocabulary = tables * config["vocab_size"] * hidden
    return int(config["num_hidden_layers"] * layer + vocabulary + hidden)


def _short(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.2f} M"


COMMAND = Command("list the official configurations", _EXAMPLES, _add_arguments, _run)
