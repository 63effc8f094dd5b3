"""Turn a decode step into a program: schedule it, verify it, draw it, break it, and run it.

python examples/05_megakernel_schedule.py [DIRECTORY]
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import tpcompile

MODEL = "preset:qwen3-0.6b"


def main(directory: str | None = None) -> None:
    schedules(Path(directory or tempfile.mkdtemp(prefix="tpcompile-")))
    torch.manual_seed(0)
    eager = AutoModelForCausalLM.from_config(small_config(), dtype=torch.float32).eval()
    step = tpcompile.schedule(eager, tp=2, target="cpu", workers=6, lowering="rows")
    print("\nThe first instructions of layer 0 on rank 1 of a small model, with their regions\n")
    print(first_instructions(tpcompile.vm.format_layer(step.program, 0, rank=1), 2))
    print("\nThe verifier's report if a wait is removed\n\n  " + counterexample(step.program))
    run(eager)


def schedules(directory: Path) -> None:
    """Schedule with three policies on two machines, and draw the last schedule."""
    print(f"{MODEL}: one step of one sequence, 1,024 tokens long\n")
    print("target  workers  policy         instructions  counters      µs  idle  proved")
    for target in ("cpu", "h200"):
        for policy in ("zigzag", "dynamic", "critical-path"):
            step = tpcompile.schedule(MODEL, target=target, policy=policy)
            report = step.report.to_json()
            print(
                f"{target:6}  {report['workers']:7}  {policy:13}  {report['instructions']:12,}  "
                f"{report['counters']:8}  {report['makespan_us']:6,.0f}  {report['idle']:4.0%}  "
                f"{'yes' if step.verified else 'no'}"
            )
    picture, trace = directory / "step.svg", directory / "step.json"
    picture.write_text(step.svg(), encoding="utf-8")
    trace.write_text(step.trace(), encoding="utf-8")  # for https://ui.perfetto.dev
    print(f"\nSee {picture} and {trace}")


def small_config() -> Qwen3Config:
    return Qwen3Config(
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=1013,
        max_position_embeddings=64,
        eos_token_id=None,
        pad_token_id=0,
    )


def first_instructions(text: str, count: int) -> str:
    lines = text.split("\ninstructions\n")[1].split("\n  i")[:count]
    return "\n  i".join(lines)


def counterexample(program: tpcompile.vm.Program) -> str:
    """Return the verifier's message after a wait between two instructions is removed."""
    for number, old in enumerate(program.waits):
        waits = (*program.waits[:number], old[1:], *program.waits[number + 1 :])
        for fault in tpcompile.vm.check_program(replace(program, waits=waits)):
            if fault.rule == "order":
                return fault.message
    raise SystemExit("The verifier accepts the program without any one of its waits.")


def run(eager: torch.nn.Module) -> None:
    """Generate 24 tokens with the reference machine, in one launch, and compare with eager."""
    prompt, new = torch.tensor([[5, 9, 2]]), 24
    with tpcompile.compile(eager, tp=2, backend="reference", lowering="rows") as model:
        tokens = model.generate(prompt, max_new_tokens=new, do_sample=False)[0, 3:].tolist()
        steps = model.steps
    expected = eager.generate(prompt, max_new_tokens=new, do_sample=False)[0, 3:].tolist()
    same = sum(a == b for a, b in zip(tokens, expected, strict=True))
    print(
        f"\n2 ranks, {steps.program} steps by the program: "
        f"{same} of {new} tokens are equal to those of eager"
    )
    if same < new:
        raise SystemExit(f"The tokens must be {expected}, got {tokens}")


if __name__ == "__main__":
    main(*sys.argv[1:])
