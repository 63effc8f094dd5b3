"""`tpcompile quantize`: write a checkpoint in few bits, with the error of each weight."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tpcompile.cli.command import (
    Command,
    Parser,
    Result,
    add_dtype_argument,
    add_quantization_arguments,
    json_text,
    number,
)
from tpcompile.cli.compiling import own_threads, progress
from tpcompile.errors import CheckpointError, UsageError
from tpcompile.presets import check_model_name
from tpcompile.runtime.new_directory import check_new_directory

_TEXT = """\
The river rises in the mountains and flows south for two hundred miles before it meets the sea. In
spring, when the snow melts, the water covers the meadows, and people from the villages travel by
boat. Some of them have kept a record of the highest water of each year since 1743."""
_MOST = 512

_EXAMPLES = """\
  tpcompile quantize ./my-checkpoint --weights int4 -o ./my-checkpoint-int4
  tpcompile quantize ./my-checkpoint --weights int4:32 --head keep -o ./made
  tpcompile quantize Qwen/Qwen3-0.6B --weights int8 -o ./made --json
  tpcompile quantize ./my-checkpoint --weights int4 -o ./made --text "Why?"

The directory is a checkpoint of compressed-tensors (pack-quantized), which
transformers and tpcompile load to the same numbers. It gets the configuration
and the tokenizer of MODEL. One weight is in memory at a time.
The command prints the relative error of each weight, and compares the logits
of the tokens of a text with those of the original weights, both in fp32.
The exit status is 0 on success, 2 for bad input."""


def _add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a directory with a config.json, or a hub id"
    )
    add_quantization_arguments(parser, required=True)
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        required=True,
        help="directory to write; it must be new or empty",
    )
    add_dtype_argument(parser)
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        default="5GB",
        help="maximum size of a file; default: 5GB",
    )
    text = parser.add_mutually_exclusive_group()
    text.add_argument(
        "--text",
        metavar="TEXT",
        help=f"text to compare the logits of, its first {_MOST} tokens; default: some sentences",
    )
    text.add_argument("--no-logits", action="store_true", help="do not compare logits")
    parser.add_argument(
        "--threads",
        metavar="N",
        type=number(1, "the number of threads"),
        help="CPU threads; default: one per core",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def _run(args: argparse.Namespace) -> Result:
    check_model_name(args.model)
    if args.model.startswith("preset:"):
        raise UsageError(
            f"{args.model} is a configuration without weights", hint="Pass a checkpoint"
        )
    check_new_directory(args.output)  # before torch is imported
    with progress() as say, own_threads(args):
        from tpcompile.quantizing import quantize

        checkpoint = quantize(
            args.model,
            args.weights,
            args.output,
            head=args.head,
            activations=args.activations,
            dtype=args.dtype,
            tokens=_tokens(args),
            max_shard_size=args.max_shard_size,
            say=say,
        )
    return Result(json_text(checkpoint.to_json()) if args.json else checkpoint.table())


def _tokens(args: argparse.Namespace) -> list[int] | None:
    """Return the ids of the text, or None if logits are not compared."""
    from tpcompile.runtime.text import encode_prompt, tokenizer_of

    if args.no_logits:
        return None
    try:
        tokenizer = tokenizer_of(args.model)
    except CheckpointError as error:
        if args.text is not None or not Path(args.model).is_dir():
            error.hint = "Compare no logits: --no-logits"
            raise error.at(error.where) from error
        sys.stderr.write(f"{args.model} has no tokenizer, so no logits are compared\n")
        return None
    return encode_prompt(tokenizer, _TEXT if args.text is None else args.text)[:_MOST]


COMMAND = Command(
    "write a checkpoint in 8 or 4 bits, and show its errors",
    _EXAMPLES,
    _add_arguments,
    _run,
)
