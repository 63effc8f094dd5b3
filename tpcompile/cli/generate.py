"""`tpcompile generate`: generate text from a prompt with a model on one or more ranks."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpcompile.cli.command import (
    Command,
    Parser,
    Result,
    add_model_arguments,
    add_threads_argument,
    backend_name,
    json_text,
    number,
    writer_of,
)
from tpcompile.cli.compiling import (
    check_runnable,
    compile_model,
    load_tokenizer,
    own_threads,
    progress,
)
from tpcompile.cli.prompts import add_prompt_arguments, prompt_of
from tpcompile.cli.sampling import (
    GREEDY,
    add_generation_config_argument,
    add_sampling_arguments,
    sampling_of,
)
from tpcompile.cli.speculation import add_speculate_argument, assistance_of
from tpcompile.cli.templates import add_template_arguments, set_template
from tpcompile.errors import UsageError

if TYPE_CHECKING:
    from tpcompile.inspect.step_trace import StepTrace
    from tpcompile.runtime.ranks.step import StepCounts
    from tpcompile.runtime.text import Generated

NEW_TOKENS = 64

_TIMED = ("native", "triton")
"""The backends that record the times of instructions."""
_EXAMPLES = """\
  tpcompile generate ./my-checkpoint --tp 2 --prompt "Once upon a time"
  tpcompile generate ./my-checkpoint --prompt "Why?" --chat --sample --seed 1
  tpcompile generate ./Qwen3-0.6B --prompt "Why?" --chat \\
      --chat-template-kwargs '{"enable_thinking": false}'
  echo "Once upon a time" | tpcompile generate ./my-checkpoint
  tpcompile generate preset:tiny-qwen3 --random-weights 0 --prompt-ids 1,2,3
  tpcompile generate ./my-checkpoint --adapter ./my-adapter --prompt Hi
  tpcompile generate ./my-checkpoint --backend native --prompt Hi --trace a.json
  tpcompile generate ./my-checkpoint --tp 2 --threads 3 --prompt Hi    6 cores
  torchrun --nproc-per-node 2 -m tpcompile generate ./my-checkpoint --prompt Hi

The command prints the prompt and its continuation as one text, without special
tokens. With --chat it prints only the answer. If MODEL has no tokenizer, it
prints token ids. Times go to stderr.
The exit status is 0 on success, 1 if a rank failed, 2 for bad input."""


def _add_arguments(parser: Parser) -> None:
    add_model_arguments(parser, timing=False, launched=True, weights=True)
    parser.add_argument(
        "--backend",
        metavar="B",
        type=backend_name,
        default="auto",
        help="auto: native on a CPU and triton on a GPU, or torch if that cannot run the model; "
        "torch: one module per rank; native: programs on CPU threads; triton: one GPU kernel; "
        "reference: an interpreter, slow; or a plugin's executor; default: auto",
    )
    parser.add_argument("--device", metavar="D", help="cpu or cuda; default: cpu")
    add_threads_argument(parser)
    add_prompt_arguments(parser)
    parser.add_argument(
        "--chat",
        action="store_true",
        help="treat the prompt as a user's turn and apply the chat template",
    )
    add_template_arguments(parser)
    parser.add_argument(
        "--max-new-tokens",
        metavar="K",
        type=number(1, "the number of tokens"),
        help=f"number of tokens to generate; default: {NEW_TOKENS}, or fewer if --max-seq-len "
        "leaves less room",
    )
    parser.add_argument(
        "--max-seq-len",
        metavar="L",
        type=number(1, "the number of tokens"),
        help="maximum length of the prompt and the continuation together; "
        "default: the configuration's",
    )
    _add_choosing(parser)
    parser.add_argument(
        "--trace",
        metavar="F.json",
        type=Path,
        help="write a Perfetto trace of the last decode step, measured and simulated; needs "
        "a program: --backend native, triton, or auto if it chooses one of them",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _add_choosing(parser: Parser) -> None:
    """Add the options that choose tokens. Without them, decoding is greedy."""
    parser.add_argument(
        "--sample",
        action="store_true",
        help="sample, using the checkpoint's generation config; the next three options imply it "
        "unless the temperature is 0",
    )
    add_sampling_arguments(parser)
    add_generation_config_argument(parser)
    add_speculate_argument(parser)
    parser.add_argument(
        "--beams",
        metavar="N",
        type=number(1, "the number of beams"),
        default=1,
        help="number of beams of a beam search; default: 1",
    )


def _run(args: argparse.Namespace) -> Result:
    prompt = _check(args)
    with progress() as say:
        from tpcompile.runtime import text

        tokenizer = _tokenizer(args)
        ids = args.prompt_ids or _encoded(args, tokenizer, prompt or "")
        room = _room(args, len(ids))
        import torch

        model = compile_model(args, say)
    with model, own_threads(args), assistance_of(args, model) as assistance:
        prints = text.is_first_process()
        streamed = prints and tokenizer is not None and args.beams == 1 and _streams(args)
        writer = text.TextWriter(tokenizer, writer_of(args.stdout), args.chat) if streamed else None
        torch.manual_seed(args.seed)
        timed = bool(args.trace) and model.backend in _TIMED
        if timed:
            model.time_steps()
        generated = text.generate_timed(
            model, ids, writer, max_new_tokens=room, **_choosing(args), **assistance
        )
        trace = model.trace() if timed and model.steps.program else None
    if not prints:
        return Result("")
    sys.stderr.write(_times(generated, model.steps))
    if args.trace:
        sys.stderr.write(_written(args.trace, trace, timed))
    output = _output_text(args, tokenizer, generated)
    counts = {"drafted": model.steps.drafted, "accepted": model.steps.accepted}
    guesses = counts if args.speculate else {}
    return Result(
        _json(generated, output, guesses) if args.json else "" if streamed else output + "\n"
    )


def _check(args: argparse.Namespace) -> str | None:
    """Refuse invalid options before torch is imported. Return the prompt, unless it is ids."""
    check_runnable(args)
    if args.chat and args.prompt_ids:
        raise UsageError(
            "--chat requires a prompt in text",
            got="--prompt-ids",
            hint="Leave out --chat, or use --prompt",
        )
    if not args.chat and (args.chat_template or args.chat_template_kwargs):
        raise UsageError(
            "A chat template is applied with --chat only",
            hint="Add --chat, or leave out --chat-template and --chat-template-kwargs",
        )
    if args.speculate and args.beams > 1:
        raise UsageError(
            "A beam search takes no guesses", got=f"--beams {args.beams} and --speculate"
        )
    if args.trace:
        from tpcompile.inspect.files import check_file

        if args.backend not in (*_TIMED, "auto"):
            raise UsageError(
                "--trace requires a backend that records the times of instructions",
                got=f"--backend {args.backend}",
                expected=" or ".join(f"--backend {name}" for name in _TIMED),
            )
        check_file(args.trace)
    return prompt_of(args)


def _written(path: Path, trace: StepTrace | None, timed: bool) -> str:
    """Write the trace; return a message with its times, or why no trace was written."""
    from tpcompile.inspect.files import write_file

    if trace is None:
        reason = "no step was run by the program" if timed else "torch modules run all steps"
        return f"warning: {path} is not written: {reason}\n"
    write_file(path, trace.write)
    return f"{trace.table()}wrote {path}\n"


def _tokenizer(args: argparse.Namespace) -> Any | None:
    """Return the tokenizer, or None if it is missing and the prompt is given as ids."""
    from tpcompile.errors import CheckpointError, UnsupportedError

    try:
        return load_tokenizer(args.model)
    except (CheckpointError, UnsupportedError):
        if args.prompt_ids:
            return None
        raise


def _encoded(args: argparse.Namespace, tokenizer: Any, prompt: str) -> list[int]:
    """Return the ids of the prompt, by the chat template with `--chat`."""
    from tpcompile.runtime.text import encode_prompt

    if not args.chat:
        return encode_prompt(tokenizer, prompt)
    set_template(args, tokenizer)
    return encode_prompt(tokenizer, prompt, chat=True, **args.chat_template_kwargs)


def _room(args: argparse.Namespace, prompt: int) -> int:
    """Return the number of tokens to generate. Refuse it if the sequence would not fit."""
    from tpcompile.frontend import config_of
    from tpcompile.frontend.positions import longest_of

    limit = longest_of(config_of(args.model), args.max_seq_len)
    wanted = args.max_new_tokens or 1
    if prompt + wanted > limit:
        least = limit - prompt
        raise UsageError(
            "The sequence would be too long",
            got=f"{prompt} prompt tokens and {wanted} new tokens",
            expected=f"at most {limit} tokens in total",
            hint=f"Give --max-new-tokens {least} or less" if least > 0 else "Shorten the prompt",
        )
    return int(args.max_new_tokens or min(NEW_TOKENS, limit - prompt))


def _choosing(args: argparse.Namespace) -> dict[str, Any]:
    chosen = sampling_of(args) or ({"do_sample": True} if args.sample else GREEDY)
    return {"num_beams": args.beams, **chosen}


def _streams(args: argparse.Namespace) -> bool:
    return bool(args.stdout.isatty()) and not args.json


def _output_text(args: argparse.Namespace, tokenizer: Any | None, generated: Generated) -> str:
    ids = generated.ids[generated.prompt_tokens :] if args.chat else generated.ids
    if tokenizer is None:
        return ",".join(map(str, ids))
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def _times(generated: Generated, steps: StepCounts) -> str:
    rate = generated.decode_tokens_per_s
    speed = "" if rate is None else f", then {rate:.1f} tokens per second"
    details = (
        f"; {steps.program} of {steps.program + steps.modules} steps by the program"
        if steps.program
        else ""
    )
    if steps.drafted:
        details += f"; {steps.accepted} of {steps.drafted} guesses accepted"
    return (
        f"{generated.prompt_tokens} prompt tokens, first token after {generated.prefill_s:.2f} s, "
        f"{generated.new_tokens} new tokens{speed}{details}\n"
    )


def _json(generated: Generated, text: str, guesses: dict[str, int]) -> str:
    return json_text(
        {
            "text": text,
            "tokens": generated.ids,
            "prompt_tokens": generated.prompt_tokens,
            "new_tokens": generated.new_tokens,
            "prefill_s": generated.prefill_s,
            "decode_tokens_per_s": generated.decode_tokens_per_s,
            **guesses,
        }
    )


COMMAND = Command("generate text from a prompt", _EXAMPLES, _add_arguments, _run)
