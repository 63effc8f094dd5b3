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
from tpcompile.backends.memory import StepMemory, rotation_of
from tpcompile.backends.reference import Machine, shuffled
from tpcompile.frontend import capture
from tpcompile.inspect.gantt import gantt_svg
from tpcompile.inspect.timeline import Timeline
from tpcompile.inspect.trace import write_trace
from tpcompile.ir.simulate import materialise
from tpcompile.passes import decode_pipeline, run_passes
from tpcompile.vm.lowering import StepPlan
from tpcompile.vm.program import Program
from tpcompile.vm.program.text import format_layer
from tpcompile.vm.proof.verify import check_program
from tpcompile.vm.schedule.scheduled import Scheduled, scheduled
from tpcompile.vm.targets import target_of

MODEL = "preset:qwen3-0.6b"
BLOCK = 16
WORKERS = 6


def main(directory: str | None = None) -> None:
    best = schedules()
    draw(best, Path(directory or tempfile.mkdtemp(prefix="tpcompile-")))
    program, machine, eager = small_machine(tp=2)
    print("\nThe first instructions of layer 0 on rank 1, with their regions\n")
    print(first_instructions(format_layer(program, 0, rank=1), 2))
    print("\nThe verifier's report if a wait is removed\n\n  " + counterexample(program))
    run(machine, eager)


def schedules() -> Scheduled:
    """Schedule with three policies on two machines, and return the last schedule."""
    captured = tpcompile.capture(MODEL)
    print(f"{MODEL}: one step of one sequence, 1,024 tokens long\n")
    print("target  workers  policy         instructions  counters      µs  idle  proved")
    for target in (target_of("cpu", workers=8), target_of("h200")):
        graph, _ = run_passes(captured, decode_pipeline(spans=target.spans))
        plan = StepPlan(target.workers, grain=target.grain)
        for policy in ("zigzag", "dynamic", "critical-path"):
            found = scheduled(graph, target, plan, policy)
            if found.timing is None:
                raise SystemExit(f"{policy} is not valid: {found.faults[0].said}")
            makespan = found.timing.makespan
            idle = sum(found.timing.idle) / (makespan * target.workers)
            print(
                f"{target.name:6}  {target.workers:7}  {policy:13}  "
                f"{len(found.program.instructions):12,}  {found.program.counters:8}  "
                f"{makespan:6,.0f}  {idle:4.0%}  yes"
            )
    return found


def draw(found: Scheduled, directory: Path) -> None:
    """Write a picture, and a trace for https://ui.perfetto.dev."""
    assert found.timing is not None
    timeline, title = Timeline(found.program, found.timing), f"{MODEL} on h200"
    picture, trace = directory / "step.svg", directory / "step.json"
    picture.write_text(gantt_svg(timeline, title, found.critical_us), encoding="utf-8")
    with trace.open("w", encoding="utf-8") as file:
        write_trace(timeline, title, file)
    print(f"\nSee {picture} and {trace}")


def small_machine(tp: int) -> tuple[Program, Machine, torch.nn.Module]:
    """Make a program of `tp` ranks from a small model with random weights, and load it."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=1013,
        eos_token_id=None,
        pad_token_id=0,
    )
    eager = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    captured = capture(eager)
    graph, _ = run_passes(captured.graph, decode_pipeline(tp, spans=2, block=BLOCK))
    plan = StepPlan(workers=WORKERS, max_seq_len=64, context=64, lowering="rows", grain=8)
    program = scheduled(graph, target_of("cpu", WORKERS), plan).program
    tensors = eager.state_dict()
    weights = materialise(graph, lambda name, part: tensors[name][part])
    rotation = rotation_of(program, captured.rotary.fresh())
    machine = Machine(StepMemory(program, lambda rank, name: weights[name][rank], rotation))
    return program, machine, eager


def first_instructions(text: str, count: int) -> str:
    lines = text.split("\ninstructions\n")[1].split("\n  i")[:count]
    return "\n  i".join(lines)


def counterexample(program: Program) -> str:
    """Return the verifier's message after a wait between two instructions is removed."""
    for number, own in enumerate(program.waits):
        waits = (*program.waits[:number], own[1:], *program.waits[number + 1 :])
        for fault in check_program(replace(program, waits=waits)):
            if fault.rule == "order":
                return fault.said
    raise SystemExit("The verifier accepts the program without any one of its waits.")


def run(machine: Machine, eager: torch.nn.Module) -> None:
    """Generate 24 tokens in one launch, in a random order, and compare with Hugging Face."""
    steps, prompt = 24, torch.tensor([5])
    blocks = torch.arange(-(-(steps + 1) // BLOCK))[None]
    machine.place(prompt, torch.tensor([1]), blocks)
    found = machine.run(steps, shuffled(seed=0))[:, 0].tolist()
    expected = eager.generate(prompt[None], max_new_tokens=steps, do_sample=False)[0, 1:].tolist()
    same = sum(a == b for a, b in zip(found, expected, strict=True))
    print(
        f"\n2 ranks, {WORKERS} workers each, random order: "
        f"{same} of {steps} tokens are equal to those of eager"
    )
    if same < steps:
        raise SystemExit(f"The tokens must be {expected}, got {found}")


if __name__ == "__main__":
    main(*sys.argv[1:])
