"""Pass `fuse-delta-step`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import fx

from tpcompile.ir.meta import operand
from tpcompile.ir.ops import DELTA_STEP, DELTA_STEP_APART, GATED_RMS_NORM, LINEAR, SPECS
from tpcompile.rewriting.rewrite import Report, calls, fuse_at, fuse_call

_LAST = SPECS[DELTA_STEP].pattern.target


@dataclass(frozen=True)
class FuseDeltaStep:
    """Fuse a step of linear attention, between its projections, into one op.

    %x, %z = split(%p);  %b, %a = split(%g)
    %q, %k, %v = heads of resumed_conv(%x, %w, %tails, …)        %y = tpc.delta_step(%p, %g, %w,
    %d = delta_decay(%a, %rate, %offset)                   →         %tails, %rate, %offset,
    %o = resumed_delta_rule(%q, %k, %v, %d, sigmoid(%b), …)          %states, %norm, …)
    %y = flatten(gated_rms_norm(%o, %z, %norm))

    If %x and %z come from separate linears, for example of weights in different formats, the op is
    `tpc.delta_step_apart`, which reads both.

    After this pass the graph supports only steps with one new token per sequence.
    """

    name: ClassVar[str] = "fuse-delta-step"
    after: ClassVar[tuple[str, ...]] = ("fuse-delta", "keep-states")

    def apply(self, gm: fx.GraphModule) -> Report:
        ends = [node for node in calls(gm, _LAST) if operand(node).target is GATED_RMS_NORM]
        return fuse_at(
            gm, ((node, partial(fuse_call, _target(node), gm.graph, node)) for node in ends)
        )


def _target(last: fx.Node) -> Any:
    """Return the op of a step that ends with these results."""
    heads = operand(operand(last), 1)
    z = operand(heads) if heads.all_input_nodes else heads
    return DELTA_STEP_APART if z.target is LINEAR else DELTA_STEP
