"""`tpcompile serve`: serve a model over HTTP, with the API that OpenAI's clients speak."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Any

from tpcompile.cli.command import (
    Command,
    Parser,
    Result,
    add_model_arguments,
    add_threads_argument,
    backend_name,
    number,
)
from tpcompile.cli.compiling import (
    check_runnable,
    compile_model,
    load_tokenizer,
    own_threads,
    progress,
)
from tpcompile.cli.logs import logged_requests
from tpcompile.cli.sampling import add_generation_config_argument
from tpcompile.cli.speculation import add_speculate_argument, draft_of
from tpcompile.cli.templates import add_template_arguments, set_template
from tpcompile.errors import CheckpointError, UnsupportedError, UsageError

if TYPE_CHECKING:
    import uvicorn

    from tpcompile.runtime.model import CompiledModel
    from tpcompile.serving import Engine
    from tpcompile.serving.server.guard import Hosts

_EXAMPLES = """\
  tpcompile serve ./my-checkpoint
  tpcompile serve ./my-checkpoint --tp 2 --port 9000 --api-key secret
  tpcompile serve ./my-checkpoint --threads 4
  tpcompile serve ./my-checkpoint --speculate prompt:8
  tpcompile serve ./Qwen3-0.6B --name qwen --name gpt-4o \\
      --chat-template-kwargs '{"enable_thinking": false}'
  tpcompile serve ./my-checkpoint --host 0.0.0.0 --api-key secret \\
      --ssl-certfile cert.pem --ssl-keyfile key.pem
  tpcompile serve ./my-checkpoint --cors-origin https://app.example
  torchrun --nproc-per-node 2 -m tpcompile serve ./my-checkpoint
  curl http://127.0.0.1:8000/v1/completions \\
      -d '{"prompt": "Once upon a time", "max_tokens": 32}'

The server speaks OpenAI's API: /v1/models, /v1/completions (with text or token
ids) and /v1/chat/completions, with streams; and vLLM's /tokenize, /detokenize
and /version. /health says whether it works, /metrics has measurements for
Prometheus, and / is a chat in the browser. It listens on this machine only
unless --host says otherwise, and answers only requests for a host that it
knows: localhost, the value of --host, or one that --allowed-host names. With
--host 0.0.0.0, these are all IP addresses and the name of the machine.
Options that a request leaves out come from the checkpoint's generation config.
Each request, and each restart of ranks, is a line on stderr without any text.
SIGTERM and Ctrl-C end it after the running requests, at most --drain-seconds
later; requests that run longer end with an error.
The exit status is 0, 1 if a rank failed, or 2 for bad input."""
_DRAIN_S = 10
_BACKLOG = 2048
"""The connections that may wait to be accepted."""
_LOCAL = "127.0.0.1"


def _add_arguments(parser: Parser) -> None:
    add_model_arguments(parser, timing=False, launched=True, weights=True)
    add = parser.add_argument
    add("--backend", metavar="B", type=backend_name, default="auto",
        help="what runs decode steps: auto (the fastest), native, triton or torch; "
        "default: auto")  # fmt: skip
    add("--device", metavar="D", help="cpu or cuda; default: cpu")
    add_threads_argument(parser)
    add("--isolate", action="store_true",
        help="run even a single rank in a worker, so that the server survives it")  # fmt: skip
    add("--host", metavar="H", default=_LOCAL, help=f"address to listen on; default: {_LOCAL}")
    add("--port", metavar="P", type=number(0, "the port"), default=8000,
        help="port to listen on, 0 for a free one; default: 8000")  # fmt: skip
    add("--allowed-host", metavar="NAME", action="append", default=[],
        help="another host by which clients, or pages in browsers, may address the server; may be "
        "given several times; * allows all; default: localhost and --host")  # fmt: skip
    add("--api-key", metavar="K",
        help="key that clients must send, except for /health and /; default: none")  # fmt: skip
    add("--name", metavar="N", action="append", default=[],
        help="name of the model: requests that name another one are refused, and answers have the "
        "first one; may be given several times; default: the last part of MODEL")  # fmt: skip
    add("--cors-origin", metavar="ORIGIN", action="append", default=[],
        help="a site whose pages may read answers in browsers, such as https://app.example; may be "
        "given several times; * allows all sites; default: none")  # fmt: skip
    add("--ssl-certfile", metavar="FILE", type=Path,
        help="speak TLS with this certificate, in PEM; default: plain HTTP")  # fmt: skip
    add("--ssl-keyfile", metavar="FILE", type=Path,
        help="the key of the certificate; default: in the same file")  # fmt: skip
    add("--drain-seconds", metavar="S", type=number(0, "the time"), default=_DRAIN_S,
        help="time in which running requests may end after SIGTERM or Ctrl-C; "
        f"default: {_DRAIN_S}")  # fmt: skip
    add_template_arguments(parser)
    add_generation_config_argument(parser)
    add_speculate_argument(parser)
    add("--tool-parser", metavar="NAME", default="auto",
        help="how the model writes calls of tools: hermes (Qwen2.5, Qwen3), qwen3-coder (also "
        "Qwen3.5), the name of a plugin's, or none; default: by the chat template")  # fmt: skip
    add("--reasoning-parser", metavar="NAME", choices=["auto", "none"], default="auto",
        help="auto separates thinking from the text, none does not; default: auto")  # fmt: skip
    add("--max-batch", metavar="B", type=number(1, "the batch"), default=16,
        help="requests that run at the same time; default: 16")  # fmt: skip
    add("--max-tokens-per-step", metavar="T", type=number(1, "the number of tokens"),
        help="tokens of a step, new ones and those of prompts; default: 1,024 of prompts besides "
        "one of each request")  # fmt: skip
    add("--max-seq-len", metavar="L", type=number(1, "the length"),
        help="tokens of a prompt and its continuation; default: the configuration's")  # fmt: skip
    add("--kv-tokens", metavar="T", type=number(1, "the number of tokens"),
        help="tokens in the KV cache, of all requests together, allocated at the start; default: "
        "as many as the longest sequences need, or as fit in half of the free memory")  # fmt: skip
    add("--snapshots", metavar="S", type=number(0, "the number of snapshots"),
        help="states of linear attention that are kept, so that prompts with the same beginning "
        "share it; default: two for each of --max-batch, or as many as fit")  # fmt: skip


def _run(args: argparse.Namespace) -> Result:
    check_runnable(args)
    if args.port > 65535:
        raise UsageError("The port must be at most 65535", got=str(args.port))
    _check_installed()
    from tpcompile.runtime.ranks.launched import launched_rank
    from tpcompile.serving.chats.forms import form_of
    from tpcompile.serving.server.guard import hosts_of
    from tpcompile.serving.server.listening import bound, check_certificate

    if launched_rank() > 0:
        return _follow(args)
    form_of(args.tool_parser, "")  # refuses an unknown name
    check_certificate(args.ssl_certfile, args.ssl_keyfile)
    with logged_requests(args.verbose), bound(args.host, args.port) as listening:  # the port first
        address = listening.getsockname()[0]
        hosts = hosts_of(args.host, address, args.allowed_host, args.cors_origin)
        tokenizer = _tokenizer(args)
        with (
            own_threads(args),
            _model(args) as model,
            draft_of(args, model) as draft,
            _engine(args, model, tokenizer, draft) as engine,
        ):
            _serve(args, engine, listening, hosts)
            if engine.failure:
                sys.stderr.write(f"error: {engine.failure}\n")
                return Result("", 1)
    return Result("")


def _follow(args: argparse.Namespace) -> Result:
    """Run the steps of rank 0, which also decides when to end."""
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)
    with own_threads(args), _model(args) as model:
        model.follow()
    return Result("")


def _model(args: argparse.Namespace) -> CompiledModel:
    with progress() as say:
        return compile_model(args, say, max_batch=args.max_batch, isolate=args.isolate)


def _engine(
    args: argparse.Namespace,
    model: CompiledModel,
    tokenizer: Any,
    draft: str | CompiledModel | None,
) -> Engine:
    from tpcompile.serving import Engine

    return Engine(
        model,
        tokenizer=tokenizer,
        max_tokens_per_step=args.max_tokens_per_step,
        kv_tokens=args.kv_tokens,
        snapshots=args.snapshots,
        speculate=draft,
    ).start()


def _serve(args: argparse.Namespace, engine: Engine, listening: socket, hosts: Hosts) -> None:
    """Serve until the process is asked to end."""
    from tpcompile.serving.server.app import application
    from tpcompile.serving.server.listening import QuietServer, config_of
    from tpcompile.serving.server.options import Options, short_name

    name, *aliases = args.name or [short_name(args.model)]
    variables = args.chat_template_kwargs
    options = Options(
        name,
        args.api_key,
        hosts=hosts,
        template_options=variables,
        tool_parser=args.tool_parser,
        reasoning_parser=args.reasoning_parser,
        aliases=tuple(aliases),
    )
    drain_s = args.drain_seconds
    config = config_of(application(engine, options), drain_s, args.ssl_certfile, args.ssl_keyfile)
    server = QuietServer(config, drain_s, engine.end_requests)
    listening.listen(_BACKLOG)
    address, port = listening.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    scheme = "http" if args.ssl_certfile is None else "https"
    sys.stderr.write(f"serving {name} on {scheme}://{shown}:{port}\n")
    sys.stderr.flush()
    with _watched(engine, server):
        server.run(sockets=[listening])


@contextmanager
def _watched(engine: Engine, server: uvicorn.Server) -> Iterator[None]:
    """End the server if the engine fails. Write a line of state per second on a terminal."""
    over, shown = threading.Event(), sys.stderr.isatty()

    def watch() -> None:
        while not over.wait(1):
            if engine.failure:
                server.should_exit = True
            if shown:
                sys.stderr.write(f"\r\x1b[K{engine.state()}")
                sys.stderr.flush()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        if shown:
            sys.stderr.write("\n")


def _tokenizer(args: argparse.Namespace) -> Any:
    """Return the tokenizer; without one, the server takes token ids only."""
    try:
        tokenizer = load_tokenizer(args.model)
    except (CheckpointError, UnsupportedError) as error:
        sys.stderr.write(f"warning: {error.message}. Requests must consist of token ids\n")
        return None
    set_template(args, tokenizer)
    return tokenizer


def _check_installed() -> None:
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"Serving needs the package {error.name}",
            hint='Run `pip install "tpcompile[serve]"`',
        ) from error


COMMAND = Command(
    "serve a model over HTTP, with OpenAI's API",
    _EXAMPLES,
    _add_arguments,
    _run,
)
