"""Writes docs/ir.md: the grammar of the text form, then a model after every pass.

python docs/make_ir_page.py            writes the page
python docs/make_ir_page.py --print    prints it
"""

import contextlib
import io
import sys
import tempfile
from pathlib import Path

from tpcompile.cli import main as tpcompile
from tpcompile.passes import ALL_PASSES

PAGE = Path(__file__).with_name("ir.md")
MODEL = ("preset:tiny-qwen3", "--tp", "4")

GRAMMAR = """# The graph, in text

`tpcompile dump` prints a graph with one line a node. This page gives the grammar, then a small
model after every pass. It is made by `make docs` and checked in CI.

## Grammar

    graph     := "graph" name "(" ("tp=" ranks | "rank" r "of" ranks) ")" section*
    section   := ("inputs" | "outside of the layers" | "layer" n | "result") line*
    line      := "%"name "=" expr ":" type ["#" origin] | "return" operand
    expr      := "input"                          a tensor that a run is given
               | "param(" recipe ")"              a parameter, and what it is made of
               | op "(" operand, … ")"            an op of the dialect (tpc.*) or of ATen
               | "%"name "[" i "]"                one of several results
    operand   := "%"name | option "=" value | "[" operand, … "]"
    type      := dtype "[" extent, … "]" placement [role] | "int" symbol | "(" type, … ")"
    extent    := whole | whole ":" ranks "×" each | whole ":" first "|" second "|" …
               | "T:" ranks "×T/" ranks           tokens in even runs (sequence-parallel)
    placement := "Replicate" | "Shard(" dim "," axis ")" | "Partial(sum)"
    axis      := "q_heads" | "kv_heads" | "ffn" | "vocab" | "tokens" | axis "+" axis
    role      := "cache(block=" n ")" | "queries(layer=" n ", block=" n ")"
               | ("values" | "lse") "(layer=" n ", block=" n ", spans=" n ")"
               | "interleaved(" rows " by " width, … ")"
    recipe    := tensor | recipe "[" from ":" to "]" | recipe " ++ " recipe | …
    origin    := module file ":" line             of the Hugging Face model

- The inputs are the tokens (`input_ids`, `positions`), where each sequence of them begins
  (`starts`), and the tokens whose logits are wanted (`logit_rows`); behind `cache-kv` also the KV
  cache, the slot in which each token is kept (`slots`), and the blocks (`tables`) and the length
  of each sequence (`lengths`). Behind `fuse-norm-qkv` each sequence has one new token, its last.
- The extents `T`, `S`, `R`, `N`, `B` and `C` are known only when the graph runs: tokens, sequence
  starts (one more than there are sequences), rows of logits, sequences, blocks of the longest one,
  slots of the cache.
- An extent that lies on several ranks shows the whole and the parts: `1013:254|253|253|253` is a
  vocabulary of 1013 on four ranks, `176:4×44` four even parts of 44. Parts may add up to more
  than the whole where ranks share units: `32:16|32|16|16` are 2 KV heads of 16, and rank 1 reads
  both.
- `q_heads+kv_heads+kv_heads` is a fused axis: each rank holds its parts of the three, one after
  the other.
- A role tells apart values of one shape: in what blocks a cache is, which layer of it the keys and
  values of queries are in, whose spans `attention_reduce` merges, and which rows have the two
  halves of each head interleaved (a width of 0: rows in the checkpoint's order). The ops that know
  a role compare it; any other op refuses an operand that has one.
- Sizes in arguments are global. What a rank really uses follows from its layout;
  `dump --rank R` shows the shapes and recipes of one rank.

## {model} on four ranks, after every pass
"""

DECODE = """## The same for a decode step

`decode_pipeline` goes on from `cache-kv` without `fuse-add-norm`, to a graph whose nodes are the
instruction groups of a step with one new token a sequence:

{passes}

```text
{text}```
"""


def page() -> str:
    parts = [GRAMMAR.format(model=MODEL[0].removeprefix("preset:"))]
    for name, text in _stages():
        sentence = (
            (ALL_PASSES[name].__doc__ or "").split("\n")[0]
            if name in ALL_PASSES
            else ("The model as torch.export sees it, one operation of Hugging Face's code a line.")
        )
        parts.append(f"### {name}\n\n{sentence}\n\n```text\n{text}```\n")
    return "\n".join([*parts, *_decode()])


def _decode() -> list[str]:
    """The stages that only a decode step has; the last of them whole, the others in words."""
    from tpcompile.passes.pipeline import decode_pipeline, pipeline_text

    passes = decode_pipeline(spans=2)
    own = passes[[current.name for current in passes].index("cache-kv") + 1 :]
    said = [f"- `{current.name}`: {(current.__doc__ or '').split(chr(10))[0]}" for current in own]
    text = _output("dump", *MODEL, "-p", pipeline_text(passes).replace("{tp=1}", ""))
    return [DECODE.format(passes="\n".join(said), text=text)]


def _stages() -> list[tuple[str, str]]:
    """Each stage of the standard pipeline with its text: one dump prints them all."""
    with tempfile.TemporaryDirectory() as directory:
        _output("dump", *MODEL, "--dump-dir", directory)
        files = sorted(Path(directory).iterdir())
        return [(file.stem.partition("-")[2], file.read_text(encoding="utf-8")) for file in files]


def _output(*command: str) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        status = tpcompile(list(command))
    if status != 0:
        raise SystemExit(f"tpcompile {' '.join(command)} gave {status}")
    return text.getvalue()


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        print(page(), end="")
    else:
        PAGE.write_text(page(), encoding="utf-8")
