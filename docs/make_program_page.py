"""Writes docs/program.md: what a program is, its instructions, and one layer of one in text.

python docs/make_program_page.py            writes the page
python docs/make_program_page.py --print    prints it
"""

import contextlib
import io
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tpcompile.cli import main as tpcompile
from tpcompile.vm.program import Program, Region
from tpcompile.vm.program.instruction import Range, StepInstruction
from tpcompile.vm.program.instruction_set import INSTRUCTIONS
from tpcompile.vm.program.text import format_layer, parse_program
from tpcompile.vm.program.text.values import operand_types, operands_of, own_types

PAGE = Path(__file__).with_name("program.md")
MACHINE = ("--target", "cpu", "--workers", "3", "--spans", "2", "--max-seq-len", "64")
SHOWN = ("preset:tiny-qwen3", *MACHINE)
SHARED = ("preset:qwen2.5-0.5b", "--target", "cpu", "--workers", "16", "--tp", "2")
BLOCKS = (*SHARED, "--lowering", "rows")

TEXT = """# The program, in text

`tpcompile schedule` turns the graph of a decode step into a program: instructions over buffers,
the queues of a machine's workers, and the counters that keep them in order. `--text` prints it.
This page is made by `make docs` and checked in CI.

## What it means

A program means what its instructions mean one after the other. Workers run their queues at
once; the verifier proves that nobody can tell the difference, whoever is fast or slow.

- **Buffers** have a number, a rank in whose memory they lie, and a kind: `weight` and `input`
  come from outside, `state` and `cache` go from step to step, `scratch` holds nothing before the
  step. Buffers of one name follow each other, one for each rank.
- **Regions** are parts of buffers: an interval in each dimension. What an instruction reads and
  writes follows from its operands; so do all dependencies, and no count is written down.
- Regions of the **cache** count layers, keys and values, sequences, KV heads, and age: `0:1` is
  what was there before the step, `1:2` the new token. So the spans of attention that hold no new
  token need not wait for one. In memory (`storage`) it lies by slot, in blocks.
- A **counter** only rises. `signal c4` raises it by one when the instruction is done; an
  instruction with `wait c4>=6` starts when it has come to 6.
- **Steps** follow each other in one launch (`repeats=true`), and counters are never cleared: in
  step s a wait is for so many signals and s times those of a whole step. `wait c4>=0` is met at
  once in the first step; later it waits for all signals of the step before.
- **Queues** are dealt evenly to the ranks, the first ones to rank 0. With `sharing=1` each belongs
  to one worker. With the dynamic policy there is one queue a rank, and `sharing` workers take from
  it: each takes the next instruction, then waits for it. Such a program is proved for *any* number
  of workers at each queue, one or more: counters alone order its instructions. A program that is
  safe only because few workers share a queue is refused.
- **Joins**: blocks of one head that several instructions compute. They are in no order among
  themselves; the last to arrive, whichever it is, norms and rotates the head and keeps it.
- **Sums** have fixed places and are added in a fixed tree, across columns, spans and ranks, so
  the results have the same bits for every schedule and every number of workers.

## Instructions

Names of buffers are without their layer; `x0` and `x1` are the residual, before and behind each
half of a layer.

| opcode | instruction | does | reads | writes |
|---:|---|---|---|---|
{table}

## Text

    program      := "program" name "ranks="n "sharing="n "repeats="bool "counters="n sections
    sections     := "buffers" buffer* "operands" operands* "instructions" instruction*
                    "queues" queue*
    buffer       := "b"n name "rank="n "kind="kind "dtype="dtype "shape="shape ["storage="shape]
    operands     := "a"n kind (field "=" value)*       what several instructions share
    instruction  := "i"n name "a"n (field "=" value)*  and what each has for itself
                    ["wait" ("c"n ">=" n)*] ["signal" ("c"n)*]
    queue        := "w"n (n | start ":" stop [":" step])*
    value        := number | "none" | start ":" stop | "true" | "false" | name

One line for each; numbers count from 0 in order; what stands behind `#` is a comment. Buffers are
operands by number, and `none` where there is none, as for the bias of a linear without one.
`tpcompile.vm.program.text.parse_program` reads it again, and refuses a line that is wrong with its
number.

## Operands and buffers

Each operand has a rule beside its type (`tpcompile.vm.program.rules`): for a buffer its kind,
its shape in terms of other operands, its dtype and its rank; for a number its range. Executors
find a `state`, an `input` or a `cache` by its name, so there the name is the role: `lengths` in
the place of `positions` is refused though both have one shape. The storage of the cache fixes the
tokens of a block: `batch * most_blocks * block` slots. An instruction whose operands agree with
its buffers touches no more than its regions say.

The verifier checks the rules before it computes a region. `parse_program` and `decode_program`
check them too, and refuse with the line or the instruction; `check=False` turns that off, for a
look at a broken program. The reference machine checks them when it loads a program.

## One layer

This is layer 0 of what

    tpcompile schedule {shown} --text

prints, with a comment behind each instruction that says in which queue it is and what it touches
(`tpcompile.vm.program.text.format_layer` adds them):

```text
{layer}```

With `--lowering rows` a head may be the work of several, and with `--tp` every rank has its part
of the program. Of rank 0 in

    tpcompile schedule {shared} --text

the blocks of the first head, and a sum; `name@1` lies in the memory of rank 1:

```text
{blocks}
```

## Words

Executors read {words} int32 words for each instruction: its opcode, the operands in the order
below (two words for a range, the fp32 bits of a fraction), then zeros.
`tpcompile.vm.program.encoding.encode_program` makes the arrays of a whole program.

```text
{operands}
```
"""


def page() -> str:
    programs = [_program(*command) for command in (SHOWN, BLOCKS)]
    return TEXT.format(
        table="\n".join(_row(kind, programs) for kind in INSTRUCTIONS.values()),
        shown=" ".join(SHOWN),
        shared=" ".join(BLOCKS),
        layer=format_layer(programs[0], 0),
        blocks=_some_blocks(format_layer(programs[1], 0, rank=0)),
        words=INSTRUCTIONS.words,
        operands="\n".join(map(_operands, INSTRUCTIONS.values())),
    )


def _row(kind: type[StepInstruction], programs: Sequence[Program]) -> str:
    reads: dict[str, None] = {}
    writes: dict[str, None] = {}
    for program in programs:
        for one in program.instructions:
            if isinstance(one, kind):
                joined = [join.region for join in one.joins]
                reads |= dict.fromkeys(_names(program, one.reads))
                writes |= dict.fromkeys(_names(program, one.writes))
                writes |= dict.fromkeys(f"{name} (joined)" for name in _names(program, joined))
    does = (kind.__doc__ or "").split("\n")[0]
    cells = [str(kind.opcode), f"`{kind.name}`", does, ", ".join(reads), ", ".join(writes)]
    return f"| {' | '.join(cells)} |"


def _names(program: Program, regions: Iterable[Region]) -> list[str]:
    found = (program.buffers[region.buffer].name for region in regions)
    return [re.sub("^l[0-9]+_", "", name) for name in found]


def _some_blocks(layer: str) -> str:
    """The blocks of the first head, and the first sum across ranks."""
    _, _, text = layer.partition("\ninstructions\n")
    each = re.split("\n(?=  i)", text.rstrip("\n"))
    shown = [one for one in each if " norm_qkv_rows " in one][:2]
    return "\n".join([*shown, next(one for one in each if " all_reduce " in one)])


def _operands(kind: type[StepInstruction]) -> str:
    shared = operand_types(operands_of(kind))
    words = [
        f"{name}:2" if inner is Range else name
        for types in (shared, own_types(kind))
        for name, inner in types.items()
    ]
    lines, line = [], f"{kind.opcode:2} {kind.name}:"
    for word in words:
        if len(line) + len(word) > 96:
            lines.append(line)
            line = "     "
        line += f" {word}"
    return "\n".join([*lines, line])


def _program(*arguments: str) -> Program:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        status = tpcompile(["schedule", *arguments, "--text"])
    if status != 0:
        raise SystemExit(f"tpcompile schedule {' '.join(arguments)} gave {status}")
    return parse_program(text.getvalue())


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        print(page(), end="")
    else:
        PAGE.write_text(page(), encoding="utf-8")
