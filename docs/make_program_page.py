"""The generator of docs/program.md: the program, its instructions, and one layer as text.

python docs/make_program_page.py            writes the page
python docs/make_program_page.py --print    prints it
"""

import contextlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from enum import IntEnum
from pathlib import Path

from tpcompile.cli import main as tpcompile
from tpcompile.presets import preset
from tpcompile.vm.program import Program, Region, abi
from tpcompile.vm.program.instruction import StepInstruction
from tpcompile.vm.program.instruction_set import INSTRUCTIONS
from tpcompile.vm.program.text import format_layer, parse_program

PAGE = Path(__file__).with_name("program.md")
MACHINE = ("--target", "cpu", "--workers", "3", "--spans", "2", "--max-seq-len", "64")
SHOWN = ("preset:tiny-qwen3", *MACHINE)
SHARED = ("preset:qwen2.5-0.5b", "--target", "cpu", "--workers", "16", "--tp", "2")
BLOCKS = (*SHARED, "--lowering", "rows")

WITHOUT_UP = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        }
    },
    "ignore": ["lm_head", "re:.*up_proj"],
}
"""A scheme in which gate and up have different formats."""

TEXT = """# The program, in text

`tpcompile schedule` turns the graph of a decode step into a program: instructions over buffers,
queues for the workers of a machine, and counters that order the instructions. `--text` prints the
program. `make docs` generates this page, and CI checks it.

## Semantics

A program means the sequential execution of its instructions. Workers run their queues
concurrently. The verifier proves that every execution order of the workers gives the sequential
result, and that each step writes `logits` and `scratch` before it reads them.

- **Buffers** have a number, a rank whose memory they are in, and a role by which executors find
  them; their names are for readers. Contents of weights, `tables`, `stops`, `cos` and `sin` come
  from outside. `logits` and `scratch` are undefined before a step. All others, the cache among
  them, persist between steps. Buffers of one name are consecutive, one per rank.
- **Regions** are parts of buffers: an interval in each dimension. The regions that an instruction
  reads and writes follow from its operands. All dependencies are derived from the regions, so no
  signal count is written by hand.
- Regions of the **cache** have five dimensions: layer, key or value, sequence, KV head, and age.
  Age `0:1` is the tokens before the step, and `1:2` is the new token. In memory (`storage`) the
  cache is indexed by slot, in blocks.
- A **row** of a batch is one new token. In most programs each row is a sequence. If `sequence_rows`
  is greater than 1, so many adjacent rows may also be the next tokens of one sequence: they have
  its blocks, each is one token longer than the row before it, and resumes from the state that this
  one writes. A row has the bits of a step with this row alone. Which rows belong together is known
  only within a step, so every span of attention reads the new tokens of all rows that may. With
  one row per sequence, the spans before the last one need not wait for its new token.
- A **counter** only increases. `signal c4` increments it when the instruction is done. An
  instruction with `wait c4>=6` starts when the counter has reached 6.
- One launch runs several **steps** (`repeats=true`), and counters are never cleared. In step s, the
  threshold of a wait is its number plus s times the counter's signals in one step. `wait c4>=0` is
  met at once in the first step; later it waits for all signals of the step before.
- Each rank has the same number of **queues**; the first ones belong to rank 0. With `sharing=1`
  each queue belongs to one worker. With the dynamic policy, which is the default on a CPU, there is
  one queue per rank, and `sharing` workers take from it. Each worker claims the next instruction,
  then waits until it may start; meanwhile another worker may take the claim over. Counters alone
  order the instructions, so such a program is proved for *any* number of workers per queue and for
  any worker that runs an instruction. A program that is safe only if few workers share a queue is
  refused.
- **Joins** are blocks of one head that several instructions compute. The blocks are not ordered
  among themselves. The last block to arrive norms, rotates and stores the head.
- **Sums** have fixed slots and are added in a fixed tree, across columns, spans and ranks. So the
  results have the same bits for every schedule and every number of workers.

## Instructions

Buffer names omit the layer. `x0` and `x1` are the residual, before and after each half of a layer.

| opcode | instruction | result | reads | writes |
|---:|---|---|---|---|
{table}

## What a program computes

`tpcompile schedule` and `check` also prove that a program computes its graph. The program runs over
*terms* instead of numbers: calls of ops over parameters and inputs, on each rank. The graph gives
other terms, with fused ops opened to their bodies, and both must be the same: the logits and the
chosen token, the keys and values of the new token in every layer of the cache, the states of linear
attention, and the state of the sequences.

- An instruction has a **meaning**: the value of which it makes a part, as ops on the whole values
  that it reads. `norm_gate_up_swiglu` means the op of this name. The part is the region that it
  writes.
- A value can be read once its parts cover it. So a tile, a span or a head that is missing, or there
  twice in the place of another one, is refused. A value that another one overwrites is lost.
- Terms of a sum are in slots. Those of some columns of a linear add up to the linear if each column
  is there once. A sum has each of its terms as often as it was added.
- A buffer of weights holds the parameter of its name: the checkpoint tensors and slices of its
  recipe, in its format.

- Buffers store terms in fp32, so that only a sum is rounded.

Otherwise the proof leaves out where values are rounded, and the order of additions. It trusts the
meanings, each of which a test puts to numbers, the regions of rules, and that executors find
weights by name. A fault names the instruction and the operand, and all layers with the same
mistake:

```text
norm_gate_up_swiglu layer 1 rank 0 rows=0:24 (instruction 56) makes a value that the graph does not
have; %l1_norm_gate_up_swiglu has %l1_gate_up_proj_weight, in linear of columns of aten.silu, where
the program has %l0_gate_up_proj_weight
linear_residual mlp layer 1 rank 0 rows=0:16 (instruction 63) reads x from swiglu, but no
instruction before it stores swiglu[0:2, 24:48] of %l1_norm_gate_up_swiglu
```

If an instruction of another package has no meaning, the program is "not proved", and the kind is
named.

## Text

    program      := "program" name "ranks="n "sharing="n "repeats="bool "counters="n sections
    sections     := "buffers" buffer* "operands" operands* "instructions" instruction*
                    "queues" queue*
    buffer       := "b"n name "rank="n "role="role "dtype="dtype "shape="shape
                    ["storage="shape] ["format="form "first="column]
    operands     := "a"n kind (field "=" value)*       shared by several instructions
    instruction  := "i"n name "a"n (field "=" value)*  with its own operands
                    ["wait" ("c"n ">=" n)*] ["signal" ("c"n)*]
    queue        := "w"n (n | start ":" stop [":" step])*
    value        := number | "none" | start ":" stop | "true" | "false" | name

Each entry is one line. Numbers count from 0 in order. `#` starts a comment. An operand that is a
buffer is given by its number; `none` is an absent buffer, such as the bias of a linear without one.
`tpcompile.vm.program.text.parse_program` parses the text; its errors name the line.

## Operands and buffers

Each operand has a rule in its type annotation (`tpcompile.vm.program.rules`). The rule of a buffer
gives its role, its shape in terms of other operands, its dtype and its rank, and the parts that the
instruction reads, writes or joins: its regions follow from them. The rule of a number gives its
range. Executors find buffers by role, so `lengths` in place of `positions` is refused, although
both have the same shape. The storage of the cache determines the tokens per block: it has
`batch * most_blocks * block` slots. An instruction whose operands agree with its buffers touches
only its regions.

The verifier checks the rules before it computes a region. `parse_program` and `decode_program` also
check them, and their errors name the line or the instruction. `check=False` turns the check off, to
inspect a broken program. The reference machine checks the rules when it loads a program.

## One layer

This is layer 0 of the output of

    tpcompile schedule {shown} --text

Comments after each instruction give its queue and the regions that it touches
(`tpcompile.vm.program.text.format_layer` adds them):

```text
{layer}```

With `--lowering rows` several instructions may compute one head. With `--tp` each rank has its
part of the program. These are the blocks of the first head of rank 0, and a sum, in

    tpcompile schedule {shared} --text

`name@1` is in the memory of rank 1:

```text
{blocks}
```

## Binary interface

Version {version} of the interface between programs and executors, which `tpcompile.vm.program.abi`
derives from the instructions' dataclasses. `abi.c_header()` prints it for C and C++,
`abi.constants()` for Python and Triton. An executor declares the version that it was built for, and
another one is refused before the first instruction.

### Words

Executors read {words} int32 words per instruction: its opcode, the operands, then zeros as padding.
A range has two words, a float the bits of its fp32, and an enumeration its number. The number
before each operand is its word. `tpcompile.vm.program.encoding.encode_program` encodes a whole
program as arrays.

```text
{operands}
```

### Buffers

A launch gets a table with a row of int64 per buffer; operands that are buffers are row numbers.
`tpcompile.backends.memory.StepMemory.table` makes the table.

| column | of a row | meaning |
|---|---|---|
{columns}

### Enumerations

| enumeration | numbers |
|---|---|
{enumerations}
"""

COLUMNS = {
    "address": "where the buffer begins in memory",
    "role": "what the buffer is for, a `Role`",
    "rank": "the rank that it belongs to",
    "dtype": "the type of its elements, a `DType`",
    "block": "the tokens per block of the KV cache, 0 for other buffers",
    "dims": "the number of dimensions in memory",
    "shape": "the extents, padded with zeros",
    "strides": "the strides in elements, padded with zeros",
    "format": "the format of a weight in few bits, a number as in words; 0 for other buffers",
    "first": "the first column of such a weight, of all columns of the linear",
    "high": "where the highest bits of its integers begin in memory, or 0",
    "scales": "where its scales begin in memory, or 0",
    "offsets": "where its offsets begin in memory, or 0",
    "minima": "where its minima begin in memory, or 0",
    "super_scales": "where the factors of its scales begin in memory, or 0",
    "super_minima": "where the factors of its minima begin in memory, or 0",
}


def page() -> str:
    programs = [_program(*command) for command in (SHOWN, BLOCKS)]
    for changes in ({"hidden_act": "gelu"}, {"quantization_config": WITHOUT_UP}):
        with tempfile.TemporaryDirectory() as directory:
            config = json.dumps({**preset("tiny-qwen3"), **changes})
            Path(directory, "config.json").write_text(config, encoding="utf-8")
            programs.append(_program(directory, *MACHINE))
    return TEXT.format(
        table="\n".join(_row(kind, programs) for kind in INSTRUCTIONS.values()),
        shown=" ".join(SHOWN),
        shared=" ".join(BLOCKS),
        layer=format_layer(programs[0], 0),
        blocks=_some_blocks(format_layer(programs[1], 0, rank=0)),
        version=abi.VERSION,
        words=INSTRUCTIONS.words,
        operands="\n".join(map(_operands, INSTRUCTIONS.values())),
        columns="\n".join(map(_column, abi.COLUMNS)),
        enumerations="\n".join(
            f"| `{name}` | {_members(enumeration)} |"
            for name, enumeration in abi.enumerations().items()
        ),
    )


def _row(kind: type[StepInstruction], programs: Sequence[Program]) -> str:
    reads: dict[str, None] = {}
    writes: dict[str, None] = {}
    for program in programs:
        for instruction in program.instructions:
            if isinstance(instruction, kind):
                joined = [join.region for join in instruction.joins]
                reads |= dict.fromkeys(_names(program, instruction.reads))
                writes |= dict.fromkeys(_names(program, instruction.writes))
                writes |= dict.fromkeys(f"{name} (joined)" for name in _names(program, joined))
    summary = (kind.__doc__ or "").split("\n")[0]
    cells = [str(kind.opcode), f"`{kind.name}`", summary, ", ".join(reads), ", ".join(writes)]
    return f"| {' | '.join(cells)} |"


def _names(program: Program, regions: Iterable[Region]) -> list[str]:
    names = (program.buffers[region.buffer].name for region in regions)
    return [re.sub("^l[0-9]+_", "", name) for name in names]


def _some_blocks(layer: str) -> str:
    """Return the blocks of the first head and the first sum across ranks."""
    _, _, text = layer.partition("\ninstructions\n")
    instructions = re.split("\n(?=  i)", text.rstrip("\n"))
    shown = [instruction for instruction in instructions if " norm_qkv_rows " in instruction][:2]
    return "\n".join(
        [*shown, next(instruction for instruction in instructions if " all_reduce " in instruction)]
    )


def _operands(kind: type[StepInstruction]) -> str:
    lines, line = [], f"{kind.opcode:2} {kind.name}:"
    for word in (f"{field.offset} {field.name}" for field in abi.layout(kind)):
        if len(line) + len(word) > 96:
            lines.append(line)
            line = "     "
        line += f" {word},"
    return "\n".join([*lines, line.rstrip(",")])


def _column(name: str) -> str:
    first, width = abi.column_offsets()[name], abi.COLUMNS[name]
    place = f"{first} to {first + width - 1}" if width > 1 else str(first)
    return f"| `{name}` | {place} | {COLUMNS[name]} |"


def _members(enumeration: type[IntEnum]) -> str:
    return ", ".join(f"{int(member)} `{member.name.lower()}`" for member in enumeration)


def _program(*arguments: str) -> Program:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        status = tpcompile(["schedule", *arguments, "--text"])
    if status != 0:
        raise SystemExit(f"tpcompile schedule {' '.join(arguments)} exited with status {status}")
    return parse_program(text.getvalue())


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        print(page(), end="")
    else:
        PAGE.write_text(page(), encoding="utf-8")
