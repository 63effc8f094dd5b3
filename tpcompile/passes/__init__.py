"""The passes, one per file. `pipeline.py` orders them; `rewriting/manager.py` runs them."""

from tpcompile.passes.pipeline import (
    PIPELINES,
    Decode,
    Pipeline,
    Standard,
    decode_pipeline,
    decoding,
    default_pipeline,
    for_ranks,
    parse_pipeline,
    pipeline,
    pipeline_text,
)
from tpcompile.rewriting.manager import (
    PASSES,
    Instrument,
    Pass,
    Stage,
    Stats,
    graph_pass,
    run_passes,
)
from tpcompile.rewriting.rewrite import Report, insert, insert_after, rewrite

__all__ = [
    "PASSES",
    "PIPELINES",
    "Decode",
    "Instrument",
    "Pass",
    "Pipeline",
    "Report",
    "Stage",
    "Standard",
    "Stats",
    "decode_pipeline",
    "decoding",
    "default_pipeline",
    "for_ranks",
    "graph_pass",
    "insert",
    "insert_after",
    "parse_pipeline",
    "pipeline",
    "pipeline_text",
    "rewrite",
    "run_passes",
]
