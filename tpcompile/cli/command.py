"""The shared parts of subcommands: description, argument parsing, refusals and output."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from tpcompile.dtypes import (
    ACTIVATIONS,
    AUTO_DTYPE,
    DTYPE_NAMES,
    DTYPES,
    EXPERTS,
    GROUP_COLUMNS,
    HEADS,
    KV,
    WEIGHTS_FORM,
    integers_of,
)
from tpcompile.errors import UsageError, did_you_mean, spelled

if TYPE_CHECKING:
    from tpcompile.rewriting.manager import FailedPassError

BACKENDS = ("auto", "torch", "native", "triton", "reference")
"""The built-in backends."""
MODEL_HELP = "a directory with a config.json, a GGUF file, a hub id, or preset:NAME"


@dataclass(frozen=True)
class Result:
    """The text for stdout, and the exit status."""

    text: str
    status: int = 0


class FailedError(Exception):
    """A pass that made an invalid graph from valid input. The exit status is 1."""

    def __init__(self, error: FailedPassError) -> None:
        super().__init__(str(error))
        self.name, self.stats, self.problems = error.name, error.stats, error.problems
        self.reproducer = error.reproducer


@dataclass(frozen=True)
class Command:
    """A subcommand: its line in the help, its examples, its arguments and its action."""

    summary: str
    examples: str
    add_arguments: Callable[[Parser], None]
    run: Callable[[argparse.Namespace], Result]
    pauses: bool = False
    """Whether Python's garbage collector is paused, because most objects live until the end."""

    def parser(self, prog: str) -> Parser:
        parser = Parser(
            prog=prog,
            description=self.summary[0].upper() + self.summary[1:] + ".",
            epilog="examples:\n" + self.examples,
        )
        self.add_arguments(parser)
        parser.add_argument(
            "-v",
            "--verbose",
            action="count",
            default=0,
            help="log passes and programs to stderr; -vv: steps too",
        )
        parser.usage = parser.short_usage()
        return parser


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `UsageError` and suggests similar options."""

    def __init__(self, **options: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(formatter_class=formatter, allow_abbrev=False, **options)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse the arguments. Check for unknown options first: they often explain missing ones."""
        known = [name for name in self._option_string_actions if name.startswith("--")]
        for word in argv:
            option = re.match(r"--[A-Za-z][^=]*", word)
            if option:
                refuse_unknown("option", option.group(), known, f"See {self.prog} --help")
        return self.parse_args(argv)

    def short_usage(self) -> str:
        """Return the usage with the required arguments only: the list of options follows it."""
        wanted = [action for action in self._actions if action.required]
        shown = [" ".join([*action.option_strings[-1:], str(action.metavar)]) for action in wanted]
        return " ".join(
            [self.prog, *sorted(shown, key=lambda text: text[0] == "-"), "[OPTION ...]"]
        )

    def options(self) -> tuple[str, ...]:
        """Return the names of the optional arguments, as Python names."""
        return tuple(action.dest for action in self._actions if action.option_strings)

    def options_in(self, words: Sequence[str]) -> set[str]:
        """Return the names of the options among the words of a command line."""
        known = self._option_string_actions
        options = (word.partition("=")[0] for word in words)
        return {known[option].dest for option in options if option in known}

    def error(self, message: str) -> NoReturn:
        raise UsageError(message[0].upper() + message[1:], hint=f"See {self.prog} --help")


def refuse_unknown(kind: str, name: str, known: Collection[str], help: str) -> None:
    if name not in known:
        raise UsageError(f"Unknown {kind} {name}", hint=f"{did_you_mean(name, known)} {help}")


@dataclass(frozen=True)
class Choice:
    """An argument type that accepts one of these words, in any case."""

    known: tuple[str, ...]

    def __call__(self, text: str) -> str:
        value = spelled(text, self.known)
        if value is None:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a valid value. {did_you_mean(text, self.known)}"
            )
        return value


def choice(*known: str) -> Choice:
    return Choice(known)


def dtype_name(text: str) -> str:
    """Parse the name of a dtype, which may be short."""
    name = choice(*DTYPES, *DTYPE_NAMES, AUTO_DTYPE)(text)
    return DTYPE_NAMES.get(name, name)


def integers_name(text: str) -> str:
    """Return the name of a format of quantized weights, or raise if it is invalid."""
    if integers_of(text) is None:
        raise argparse.ArgumentTypeError(f"must be {WEIGHTS_FORM}, got {text!r}")
    return text


def backend_name(text: str) -> str:
    """Parse the name of a backend. Executors are imported only for names that are not built in."""
    name = spelled(text, BACKENDS)
    if name:
        return name
    from tpcompile.backends.executor import EXECUTORS

    return choice(*dict.fromkeys((*BACKENDS, *EXECUTORS)))(text)


def number(least: int, subject: str) -> Callable[[str], int]:
    """Return an argument type that accepts integers of at least `least`."""

    def read(text: str) -> int:
        if not re.fullmatch(r"\d+", text) or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"{subject} must be an integer of at least {least}, got {text!r}"
            )
        return int(text)

    return read


def add_model_arguments(
    parser: Parser,
    timing: bool = True,
    *,
    launched: bool = False,
    weights: bool = False,
    pipeline_default: str = "the standard pipeline",
) -> None:
    """Add the arguments shared by all commands that compile a model.

    Commands that run the model may be `launched` by torchrun, and those that read `weights` can
    make random ones.
    """
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--tp",
        metavar="N",
        default=None if launched else 1,
        type=number(1, "the number of ranks"),
        help="number of ranks, from 1 to the model's number of query heads; default: 1"
        + (", or the number of processes under torchrun" if launched else ""),
    )
    parser.add_argument(
        "-p",
        "--pipeline",
        metavar="PIPELINE",
        help=f'passes to run, e.g. "canonicalize,raise-norm"; default: {pipeline_default} '
        "(see tpcompile passes)",
    )
    add_dtype_argument(parser)
    add_quantization_arguments(parser)
    add_kv_argument(parser)
    add_experts_argument(parser)
    parser.add_argument(
        "--adapter",
        metavar="DIR",
        type=Path,
        help="a LoRA adapter of peft, which is merged into the weights while they are loaded",
    )
    if weights:
        parser.add_argument(
            "--random-weights",
            metavar="SEED",
            type=number(0, "the seed"),
            help="run the model with random weights from this seed, for a MODEL without weights",
        )
    if timing:
        parser.add_argument(
            "--timing", action="store_true", help="print a table of pass times to stderr"
        )


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a model that `compile`, `schedule` and `explore` share."""
    names = ("tp", "dtype", "pipeline", "weights", "head", "activations", "kv", "experts")
    return {name: getattr(args, name) for name in names}


def add_dtype_argument(parser: Parser) -> None:
    """Add the dtype of a model."""
    parser.add_argument(
        "--dtype",
        type=dtype_name,
        metavar="D",
        default=AUTO_DTYPE,
        help="float32, bfloat16, float16 (or fp32, bf16, fp16), or auto: that of the "
        "configuration; default: auto",
    )


def add_quantization_arguments(parser: Parser, *, required: bool = False) -> None:
    """Add the options that quantize a model while it is loaded."""
    parser.add_argument(
        "--weights",
        metavar="W",
        type=integers_name,
        required=required,
        help=("" if required else "quantize the linears while they are loaded: ")
        + f"int8 or int4, with a scale per group of {GROUP_COLUMNS} columns, of others as in "
        "int4:32, or per row as in int8:row"
        + ("" if required else "; default: as MODEL stores them"),
    )
    parser.add_argument(
        "--head",
        metavar="H",
        type=choice(*HEADS),
        help="with --weights, what the head becomes: int8, int4, or keep; default: int8",
    )
    parser.add_argument(
        "--activations",
        metavar="A",
        type=choice(*ACTIVATIONS),
        default=ACTIVATIONS[0],
        help="what linears with weights in 8 to 4 bits round their inputs to: int8, with a scale "
        "per token and block of columns, or 16, the model's dtype; default: 16",
    )


def add_kv_argument(parser: Parser) -> None:
    """Add the format of the KV cache."""
    parser.add_argument(
        "--kv",
        metavar="K",
        type=choice(*KV),
        help="store keys and values in int8, with a scale per token and head; default: in the "
        "model's dtype",
    )


def add_experts_argument(parser: Parser) -> None:
    """Add the division of experts among ranks."""
    parser.add_argument(
        "--experts",
        metavar="E",
        type=choice(*EXPERTS),
        default=EXPERTS[0],
        help="how ranks share a mixture of experts: tp, a part of every expert, ep, whole experts, "
        "or auto, the plan whose busiest rank reads fewer bytes of experts; default: auto",
    )


def add_threads_argument(parser: Parser, condition: str = "") -> None:
    """Add the number of threads of a rank, of a command that runs a model."""
    parser.add_argument(
        "--threads",
        metavar="N",
        type=number(1, "the number of threads"),
        help=f"{condition}CPU threads per rank: the workers of programs, and torch's for modules; "
        "default: the ranks share the cores that this process may use",
    )


def workers_of(args: argparse.Namespace) -> int | None:
    """Return the workers per rank of a program that runs on this machine: its threads."""
    if None not in (args.workers, args.threads) and args.workers != args.threads:
        raise UsageError(
            "The workers of a program that runs on this CPU are its threads",
            got=f"--workers {args.workers} and --threads {args.threads}",
            hint="Leave out one of them",
        )
    workers: int | None = args.workers or args.threads
    return workers


def printable(text: str, stream: TextIO) -> str:
    """Return the text with escapes for characters that the stream cannot encode."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def writer_of(stream: TextIO) -> Callable[[str], None]:
    """Return a callback that writes text to a stream without delay."""

    def write(text: str) -> None:
        stream.write(printable(text, stream))
        stream.flush()

    return write


def json_text(data: dict[str, Any]) -> str:
    """Format as JSON with one line per key, and one line per item of a list of objects."""
    return "{\n" + ",\n".join(f"{json.dumps(k)}: {_value(v)}" for k, v in data.items()) + "\n}\n"


def _value(value: Any) -> str:
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return "[\n" + ",\n".join(json.dumps(item, ensure_ascii=False) for item in value) + "\n]"
    return json.dumps(value, ensure_ascii=False)
