"""Visits of every stage of a model, on several numbers of ranks and by all pipelines."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from tpcompile.ir.text import format_graph
from tpcompile.passes import for_ranks, parse_pipeline, run_passes

TINY = ("tiny-qwen2", "tiny-qwen3")
PIPELINES = ("standard", "standard{interleaved=True}", "decode", "decode{interleaved=True,spans=2}")


def visit_stages(
    graph: fx.GraphModule, ranks: Sequence[int], look: Callable[[str, fx.GraphModule], None]
) -> int:
    """Call `look` with the text and the graph of each stage; return the number of stages.

    A stage that several pipelines share is visited once.
    """
    texts: set[str] = set()

    def once(name: str, gm: fx.GraphModule, stats: object) -> None:
        text = format_graph(gm)
        if text not in texts:
            texts.add(text)
            look(text, gm)

    for tp in ranks:
        for pipeline in PIPELINES:
            run_passes(graph, for_ranks(parse_pipeline(pipeline), tp), [once])
    return len(texts)
