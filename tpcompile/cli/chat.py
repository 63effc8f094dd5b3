"""`tpcompile chat`: a conversation with a model on one or more ranks."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tpcompile.cli.command import (
    Command,
    Parser,
    Result,
    add_model_arguments,
    add_threads_argument,
    backend_name,
    number,
    refuse_unknown,
    writer_of,
)
from tpcompile.cli.compiling import (
    check_runnable,
    compile_model,
    load_tokenizer,
    own_threads,
    progress,
)
from tpcompile.cli.sampling import (
    add_generation_config_argument,
    add_sampling_arguments,
    answer_options,
)
from tpcompile.cli.speculation import add_speculate_argument, assistance_of
from tpcompile.cli.templates import add_template_arguments, set_template
from tpcompile.errors import CheckpointError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from tpcompile.runtime.conversation import Conversation

_EXAMPLES = """\
  tpcompile chat ./my-checkpoint
  tpcompile chat ./my-checkpoint --tp 2 --system "Answer in one sentence."
  tpcompile chat ./my-checkpoint --temperature 0
  tpcompile chat ./my-checkpoint --threads 2
  tpcompile chat ./Qwen3-0.6B \\
      --chat-template-kwargs '{"enable_thinking": false}'
  echo "Why is the sky blue?" | tpcompile chat ./my-checkpoint

Each line is a message. /reset starts a new conversation, and /exit or Ctrl-D
ends the command. Ctrl-C stops an answer. Without options, tokens are chosen as
the checkpoint's generation config says. Answers go to stdout.
The exit status is 0, 1 if a rank failed, or 2 for bad input."""

_COMMANDS = ("/reset", "/exit")
_PROMPT = "> "


def _add_arguments(parser: Parser) -> None:
    add_model_arguments(parser, timing=False, weights=True)
    add = parser.add_argument
    add("--backend", metavar="B", type=backend_name, default="auto",
        help="what runs decode steps: auto (the fastest), native, triton or torch; "
        "default: auto")  # fmt: skip
    add("--device", metavar="D", help="cpu or cuda; default: cpu")
    add_threads_argument(parser)
    add("--system", metavar="TEXT", help="the system's message at the beginning")
    add_template_arguments(parser)
    add("--max-new-tokens", metavar="K", type=number(1, "the number of tokens"),
        help="most tokens of an answer; default: the checkpoint's, or as many as fit")  # fmt: skip
    add("--max-seq-len", metavar="L", type=number(1, "the number of tokens"),
        help="most tokens of the conversation; default: the configuration's")  # fmt: skip
    add_sampling_arguments(parser)
    add_generation_config_argument(parser)
    add_speculate_argument(parser)


def _run(args: argparse.Namespace) -> Result:
    check_runnable(args)
    with progress() as say:
        tokenizer = _tokenizer(args)
        import torch

        from tpcompile.runtime.conversation import Conversation
        from tpcompile.runtime.ranks.launched import has_launcher
        from tpcompile.serving.defaults import sampling_defaults

        if has_launcher():
            raise UsageError(
                "Under torchrun the processes share stdin, so it cannot hold a conversation",
                hint="Leave out torchrun and give --tp, or start tpcompile serve under torchrun",
            )
        model = compile_model(args, say, max_batch=1)
    with model, own_threads(args), assistance_of(args, model) as assistance:
        torch.manual_seed(args.seed)
        options = answer_options(args, sampling_defaults(model.generation_config)) | assistance
        conversation = Conversation(model, tokenizer, args.system, args.chat_template_kwargs)
        _talk(args, conversation, options)
    return Result("")


def _tokenizer(args: argparse.Namespace) -> Any:
    """Return the tokenizer with a chat template, or refuse a model without one."""
    try:
        tokenizer = load_tokenizer(args.model)
    except (CheckpointError, UnsupportedError) as error:
        error.hint = "Use a checkpoint with a tokenizer and a chat template"
        raise error.at(error.where) from error
    set_template(args, tokenizer)
    if not tokenizer.chat_template:
        raise UsageError(
            f"The tokenizer of {args.model} has no chat template",
            expected="a model trained to chat",
            hint="Continue text with tpcompile generate, or give a template: --chat-template FILE",
        )
    return tokenizer


def _talk(args: argparse.Namespace, conversation: Conversation, options: Mapping[str, Any]) -> None:
    terminal = sys.stdin.isatty()
    if terminal:
        sys.stderr.write("/reset starts anew, /exit or Ctrl-D ends, Ctrl-C stops an answer.\n")
    for line in _lines(args, terminal):
        try:
            if re.fullmatch(r"/\w+", line):
                refuse_unknown("command", line, _COMMANDS, "Such a word is a command")
                if line == "/exit":
                    return
                conversation.reset()
            elif line:
                _answer(args, conversation, line, options)
        except UsageError as error:
            if not terminal:
                raise
            sys.stderr.write(f"error: {error}\n")


def _answer(
    args: argparse.Namespace, conversation: Conversation, message: str, options: Mapping[str, Any]
) -> None:
    write = writer_of(args.stdout)
    with _interrupts() as interrupts:
        answer = conversation.answer(message, write, lambda: bool(interrupts), **options)
    if interrupts:
        sys.stderr.write("(stopped)\n")
    elif answer.tokens == answer.room:
        sys.stderr.write(f"(stopped after {answer.tokens} tokens)\n")


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Yield a list that receives the first Ctrl-C. The second one interrupts the program."""
    received: list[int] = []

    def receive(number: int, frame: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    before = signal.signal(signal.SIGINT, receive)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)


def _lines(args: argparse.Namespace, terminal: bool) -> Iterator[str]:
    """Yield the lines of stdin. On a terminal they can be edited, and Ctrl-C drops a line."""
    shown = args.stdout if args.stdout.isatty() else sys.stderr
    if terminal:
        with contextlib.suppress(ImportError):  # some builds of Python have none
            importlib.import_module("readline")  # input() uses it
    while True:
        try:
            with contextlib.redirect_stdout(shown):
                line = input(_PROMPT if terminal else "")
        except EOFError:
            sys.stderr.write("\n" if terminal else "")
            return
        except KeyboardInterrupt:
            if not terminal:
                raise
            sys.stderr.write("\n")
            continue
        except UnicodeDecodeError as error:
            raise UsageError(
                "Messages must be UTF-8 text", where="stdin", got=str(error)
            ) from error
        yield line.strip()


COMMAND = Command("chat with a model", _EXAMPLES, _add_arguments, _run)
