"""The conditions in which sides decode, and the ratios to decoding alone that must be reached."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.decode_measured import LLAMA, OPENVINO

LAUNCHES, TOKENS = "tpcompile tp=1, launches", "tpcompile tp=1, tokens"
LAUNCHES_TWO, TOKENS_TWO = "tpcompile tp=2, launches", "tpcompile tp=2, tokens"
OURS = {LAUNCHES: 1.0, TOKENS: 1.0, LAUNCHES_TWO: 1.1, TOKENS_TWO: 1.1}
"""The sides that have limits, each with the factor of its limits."""
SIDES = (*OURS, OPENVINO, LLAMA)
CORES = 2
"""The cores of the benchmark, to which the limits apply."""
QUOTA = 1.5
"""The cores of which a quota gives the time."""
LATE = 2.0
"""The limit of the 90th percentile of steps beside busy processes, relative to their median."""


@dataclass(frozen=True)
class Condition:
    """What a side decodes beside or within, compared with decoding alone.

    A restriction applies to a process that is running, or to another one of the same side that
    loads within it: such a process may choose its threads for the cores that it has.
    """

    name: str
    title: str
    most: float
    """The largest ratio to decoding alone."""
    busy: tuple[int, ...] = ()
    """The nice values of busy processes."""
    one_core: bool = False
    quota: bool = False
    loads_within: bool = False
    twin: bool = False
    """Another process of the same side decodes at the same time."""

    @property
    def second(self) -> bool:
        """Whether the condition needs another process of each side."""
        return self.loads_within or self.twin


CONDITIONS = (
    Condition("nice-10", "one busy process, nice 10", 1.15, busy=(10,)),
    Condition("nice-0", "one busy process, nice 0", 1.6, busy=(0,)),
    Condition("two-nice-0", "two busy processes, nice 0", 2.4, busy=(0, 0)),
    Condition("quota", f"started in a quota of {QUOTA:g}", 1.5, quota=True,
        loads_within=True),
    Condition("quota-later", f"moved to a quota of {QUOTA:g}", 1.5, quota=True),
    Condition("one-core", "started on one core", 2.1, one_core=True, loads_within=True),
    Condition("one-core-later", "moved to one core", 2.1, one_core=True),
    Condition("two-at-once", "two at once", 2.2, twin=True),
)  # fmt: skip
BY_NAME = {condition.name: condition for condition in CONDITIONS}
