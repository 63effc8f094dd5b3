"""The `tpcompile` command: one file per subcommand. Heavy modules are imported when needed."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import sys
from collections.abc import Sequence
from itertools import takewhile

from tpcompile import __version__
from tpcompile.cli import (
    calibrate,
    chat,
    check,
    compare,
    completion,
    dump,
    explore,
    generate,
    make_demo,
    opt,
    passes,
    plan,
    presets,
    quantize,
    reduce,
    schedule,
    serve,
)
from tpcompile.cli.command import Command, FailedError, Parser, Result, printable, refuse_unknown
from tpcompile.cli.logs import logged
from tpcompile.cli.wording import with_options
from tpcompile.errors import CompileError, PassError, RankError, VerifyError
from tpcompile.libraries import library_errors
from tpcompile.pause import paused_collector
from tpcompile.plugins import load_plugins

COMMANDS: dict[str, Command] = {
    "dump": dump.COMMAND,
    "explore": explore.COMMAND,
    "opt": opt.COMMAND,
    "reduce": reduce.COMMAND,
    "passes": passes.COMMAND,
    "presets": presets.COMMAND,
    "plan": plan.COMMAND,
    "check": check.COMMAND,
    "schedule": schedule.COMMAND,
    "calibrate": calibrate.COMMAND,
    "compare": compare.COMMAND,
    "generate": generate.COMMAND,
    "chat": chat.COMMAND,
    "serve": serve.COMMAND,
    "quantize": quantize.COMMAND,
    "make-demo": make_demo.COMMAND,
    "completion": completion.COMMAND,
}

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
_VERBOSE = re.compile(r"-v+|--verbose")

_EXAMPLES = """\
examples:
  tpcompile dump preset:tiny-qwen3 --tp 2         the sharded graph
  tpcompile dump preset:tiny-qwen3 --tp 2 --diff  what each pass changed
  tpcompile plan preset:qwen3-8b --tp 6           heads and bytes of each rank
  tpcompile schedule preset:qwen3-8b --target h200 --svg step.svg
  tpcompile generate ./checkpoint --tp 2 --prompt "Once upon a time"

MODEL is a directory with a config.json, a GGUF file, a hub id, or preset:NAME.
`tpcompile COMMAND --help` lists the options of a command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return the exit status.

    Without `argv` it is the command line of this process, which ends afterwards. The interpreter
    then need not search for garbage, which takes as long as importing a library of torch's size.
    """
    words = _command_first(sys.argv[1:] if argv is None else argv)
    if argv is not None:
        return _status(words)
    command = _command_of(words)
    if command is not None and command.pauses:
        gc.disable()  # else it would collect once at the end of the pause
    status = _status(words, alone=True)
    gc.freeze()
    return status


def _status(words: list[str], alone: bool = False) -> int:
    """Run one command line and return the exit status."""
    try:
        with library_errors():
            result = _run(words, alone)
    except SystemExit as shown:  # argparse exits after printing help or the version
        result = Result("", int(shown.code or 0))
    except (FailedError, RankError) as error:
        sys.stderr.write(f"error: {_worded(error, words)}\n")
        return FAILED
    except CompileError as error:
        sys.stderr.write(f"error: {_worded(error, words)}\n")
        # Both: a FailedPassError, whose module imports torch.
        failed = isinstance(error, PassError) and isinstance(error, VerifyError)
        return FAILED if failed else BAD_INPUT
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    return _write(result)


def _command_first(argv: Sequence[str]) -> list[str]:
    """Return the words with `-v` after the command, where its parser expects it."""
    flags = list(takewhile(_VERBOSE.fullmatch, argv))
    command, arguments = argv[len(flags) :][:1], argv[len(flags) + 1 :]
    return [*command, *flags, *arguments]


def _command_of(words: Sequence[str]) -> Command | None:
    return COMMANDS.get(words[0]) if words else None


def _worded(error: Exception, words: list[str]) -> str:
    """Return the message of an error, with the options of the command that raised it."""
    command = _command_of(words)
    if command is None:
        return str(error)
    parser = command.parser("")
    return with_options(str(error), parser.options(), parser.options_in(words))


def _run(argv: list[str], alone: bool) -> Result:
    """Run the command and return its result. Output that libraries print goes to stderr."""
    top = _top_parser()
    if not argv:
        sys.stderr.write(top.format_help())
        return Result("", BAD_INPUT)
    if argv[0].startswith("-"):
        top.parse(argv)
    name, *arguments = argv
    refuse_unknown("command", name, COMMANDS, "See tpcompile --help")
    load_plugins()  # before the parser is built: plugins add choices
    command = COMMANDS[name]
    args = command.parser(f"tpcompile {name}").parse(arguments)
    args.words = argv  # for errors that repeat the command
    args.stdout = sys.stdout  # for streamed results
    args.alone = alone
    pause = paused_collector() if command.pauses else contextlib.nullcontext()
    with contextlib.redirect_stdout(sys.stderr), logged(args.verbose), pause:
        return command.run(args)


def _top_parser() -> Parser:
    width = max(map(len, COMMANDS)) + 2
    commands = [f"  {name:{width}}{command.summary}" for name, command in COMMANDS.items()]
    parser = Parser(
        prog="tpcompile",
        usage="tpcompile COMMAND ...",
        description="A compiler for Hugging Face Qwen models: tensor parallelism for any tp.\n\n"
        "commands:\n" + "\n".join(commands),
        epilog=_EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"tpcompile {__version__}")
    return parser


def _write(result: Result) -> int:
    try:
        sys.stdout.write(printable(result.text, sys.stdout))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe, as in `| head`
        _discard_the_rest()
    except OSError as error:  # for example a full disk
        _discard_the_rest()
        sys.stderr.write(f"error: The result cannot be written to stdout: {error}.\n")
        return BAD_INPUT
    return result.status


def _discard_the_rest() -> None:
    """Redirect stdout to the null device: flushing the buffered text at exit would fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
