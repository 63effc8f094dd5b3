"""Workers prepare the values of a family of instructions once per step."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.backends.reference.stepping import Case, place
from tpcompile.backends.native import Native
from tpcompile.vm.groups.mlp import NormGateUpSwiglu
from tpcompile.vm.program.encoding import families


def test_values_are_prepared_in_each_step() -> None:
    """Also by a worker that runs nothing else than one family, step after step."""
    case = Case("tiny-qwen3", lengths=(9, 3), spans=1, policy="dynamic", workers=2)
    runs = []
    for alone in (False, True):
        memory = case.memory()
        if alone:
            program = memory.program
            numbers = families(program).tolist()
            family = next(
                n for n in numbers if isinstance(program.instructions[n], NormGateUpSwiglu)
            )
            queues = [
                [n for n, of in enumerate(numbers) if (of == family) == inside] for inside in (0, 1)
            ]
            memory.program = replace(program, queues=tuple(map(tuple, queues)), sharing=1)
        native = Native(memory)
        place(native, case)
        runs.append((native.run(3), native.logits.clone()))
        native.close()
    assert all(map(torch.equal, *runs))
