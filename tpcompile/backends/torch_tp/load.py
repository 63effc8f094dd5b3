"""Loading emitted source as a module, and running all ranks in one process."""

from __future__ import annotations

import linecache
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from tpcompile.comm.group import Group, SimulatedGroup
from tpcompile.errors import RankError


def load_rank(
    source: str, rank: int, parameters: Mapping[str, torch.Tensor], rotary: nn.Module, group: Group
) -> nn.Module:
    """Return the module that `source` defines. Tracebacks show its lines."""
    filename = f"<tpcompile rank {rank}, {hash(source) & 0xFFFFFFFF:08x}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"__name__": f"tpcompile_rank_{rank}"}
    exec(compile(source, filename, "exec"), namespace)
    module: nn.Module = namespace[f"Rank{rank}"](parameters, rotary, group)
    return module.eval()


def run_simulated(
    modules: Sequence[nn.Module],
    group: SimulatedGroup,
    inputs: Sequence[Mapping[str, torch.Tensor]],
) -> list[torch.Tensor]:
    """Run every module on its inputs, given by name, and return the results."""

    def run(module: nn.Module, arguments: Mapping[str, torch.Tensor]) -> torch.Tensor:
        with torch.inference_mode():
            output: torch.Tensor = module(**arguments)
        return output

    return run_together(
        [
            partial(run, module, arguments)
            for module, arguments in zip(modules, inputs, strict=True)
        ],
        group,
    )


def run_together(
    ranks: Sequence[Callable[[], torch.Tensor]], group: SimulatedGroup
) -> list[torch.Tensor]:
    """Run all ranks, in threads if there are several, and return the results.

    If ranks fail, the first error is raised.
    """
    results: list[Any] = [None] * len(ranks)
    errors: list[tuple[int, BaseException]] = []

    def work(rank: int) -> None:
        try:
            results[rank] = ranks[rank]()
        except threading.BrokenBarrierError:
            pass  # another rank failed and recorded its error
        except BaseException as error:  # raised in the calling thread below
            errors.append((rank, error))
            group.abort()

    with group.lock:
        if len(ranks) == 1:
            return [ranks[0]()]
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            group.reset()
    if errors:
        rank, error = errors[0]
        raise RankError(f"Rank {rank} failed", got=f"{type(error).__name__}: {error}") from error
    return results
