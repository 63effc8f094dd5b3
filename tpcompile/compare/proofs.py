"""Proofs of passes and of the program, before anything is measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tpcompile.passes import Pass, Stage
from tpcompile.rewriting.proving import rewrites_of
from tpcompile.vm.proof.computes import Computed


@dataclass(frozen=True)
class ProvedPass:
    """A pass, with the rewrites of its proof, or the reason why it is not proved."""

    name: str
    rewrites: tuple[str, ...] = ()
    """The rewrites that it declares, none if it changed nothing."""
    reason: str = ""
    """The reason why it is not proved; empty if it is."""


@dataclass(frozen=True)
class Proofs:
    """The proofs of a compilation, for all inputs and weights."""

    passes: tuple[ProvedPass, ...] = ()
    program: Computed | None = None
    """The proof that the program computes the graph, None without a program."""

    @staticmethod
    def of(passes: Sequence[Pass], stages: Sequence[Stage]) -> Proofs:
        """Return the proofs of passes, each of which has made a stage after the captured graph."""
        return Proofs(
            tuple(
                ProvedPass(stage.name, _rewrites(current, stage), stage.stats.unproved)
                for current, stage in zip(passes, stages[1:], strict=True)
            )
        )

    def to_json(self) -> dict[str, Any]:
        program = self.program
        return {
            "passes": [
                {
                    "name": proof.name,
                    "proved": not proof.reason,
                    "rewrites": list(proof.rewrites),
                    "reason": proof.reason or None,
                }
                for proof in self.passes
            ],
            "program": None if program is None else program.proved,
        }

    def text(self) -> str:
        """List the proved and the unproved passes, and the measured parts."""
        return "".join(f"{line}\n" for line in self._lines()) if self != Proofs() else ""

    def _lines(self) -> Iterator[str]:
        proved = [proof for proof in self.passes if not proof.reason]
        count = "1 pass" if len(proved) == 1 else f"{len(proved)} passes"
        if proved:
            yield f"proved: {count}, after which the graph computes what was captured"
        rewrites = [f"{rewrite} ({proof.name})" for proof in proved for rewrite in proof.rewrites]
        if rewrites:
            yield f"  with the rewrites {', '.join(rewrites)}"
        for proof in self.passes:
            if proof.reason:
                yield f"NOT proved: {proof.name}: {proof.reason}"
        if self.program is not None and self.program.proved:
            yield "proved: the program computes the graph"
        elif self.program is not None:
            yield f"NOT proved: the program: {self.program.summary}"
        executors = "modules" if self.program is None else "executors"
        yield f"measured: the capture beside eager, rounding, and the {executors}"


def _rewrites(current: Pass, stage: Stage) -> tuple[str, ...]:
    return tuple(rewrite.name for rewrite in rewrites_of(current)) if stage.stats.matches else ()
