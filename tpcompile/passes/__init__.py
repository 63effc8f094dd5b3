"""The passes, one per file. `pipeline.py` orders them; `rewriting/manager.py` runs them."""

from tpcompile.passes.pipeline import (
    ALL_PASSES,
    ALL_PIPELINES,
    decode_pipeline,
    default_pipeline,
    for_ranks,
    parse_pipeline,
    pipeline_text,
)
from tpcompile.rewriting.manager import Instrument, Pass, Stage, Stats, run_passes
from tpcompile.rewriting.rewrite import Report, insert, insert_after, rewrite

__all__ = [
    "ALL_PASSES",
    "ALL_PIPELINES",
    "Instrument",
    "Pass",
    "Report",
    "Stage",
    "Stats",
    "decode_pipeline",
    "default_pipeline",
    "for_ranks",
    "insert",
    "insert_after",
    "parse_pipeline",
    "pipeline_text",
    "rewrite",
    "run_passes",
]
