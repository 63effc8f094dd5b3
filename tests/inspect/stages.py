"""Graphs of a tiny model for the tests: captured and sharded."""

from __future__ import annotations

from functools import lru_cache

from torch import fx

from tests.models import preset_pair
from tests.stages import graph_after
from tpcompile.passes import Instrument, default_pipeline, for_ranks, parse_pipeline, run_passes


@lru_cache
def graph(tp: int, pipeline: str = "") -> fx.GraphModule:
    """tiny-qwen3 for `tp` ranks, after the standard pipeline or another."""
    return lowered(tp, pipeline=pipeline)


def lowered(tp: int, *instruments: Instrument, pipeline: str = "") -> fx.GraphModule:
    passes = for_ranks(parse_pipeline(pipeline), tp) if pipeline else default_pipeline(tp)
    return run_passes(preset_pair("tiny-qwen3").captured.graph, passes, instruments)[0]


@lru_cache
def captured() -> fx.GraphModule:
    """Return the graph before any pass."""
    return graph_after(preset_pair("tiny-qwen3"), [])
