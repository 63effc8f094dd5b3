"""Programs of mixtures follow eager's choices; changed ones within rounding pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import fx

from tests.compare.mistakes_of_experts import MISTAKES, tied
from tests.compare.program.wrong import Mistaken, Patched
from tpcompile.backends.native import Native
from tpcompile.compare.comparison import Comparison
from tpcompile.compare.group_rows import GroupRow
from tpcompile.compare.program import Batch, Case, case, compare_program, plan_for, prepare
from tpcompile.compare.program import program as sides
from tpcompile.passes import Stage, run_passes
from tpcompile.passes.keep_states import KeepStates
from tpcompile.passes.pipeline import decode_pipeline
from tpcompile.vm.groups import TopExperts, experts
from tpcompile.vm.lowering import Lowered, lower
from tpcompile.vm.program import Program
from tpcompile.vm.program.instruction import Memory, Probe, unseen

BATCH = Batch((9, 6, 4, 3, 3, 1), 2)
TP = 2


@lru_cache
def case_of(dtype: torch.dtype) -> Case:
    return prepare(tied(dtype), decode_pipeline(TP, 2, 4), BATCH)
