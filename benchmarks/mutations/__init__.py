"""Deliberate mistakes in sharded graphs, to test the checks that should detect them."""

from benchmarks.mutations.draft import Draft, UnfitError
from benchmarks.mutations.judge import Verdict, judge, judge_numbers
from benchmarks.mutations.kinds import KINDS, Kind
from benchmarks.mutations.make import Mutant, mutants_of
from benchmarks.mutations.subjects import SUBJECTS, Graph, Subject, graphs

__all__ = [
    "KINDS",
    "SUBJECTS",
    "Draft",
    "Graph",
    "Kind",
    "Mutant",
    "Subject",
    "UnfitError",
    "Verdict",
    "graphs",
    "judge",
    "judge_numbers",
    "mutants_of",
]
