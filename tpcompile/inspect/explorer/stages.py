"""The stages of a compilation for the page: lines with repeated layers folded, and fates of values.

The recorder is an instrument. Passes change a graph in place, so a node that is still there is the
same value, and the passes record which captured value a new node computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx

from tpcompile.inspect.explorer.lines import Lines, general_name, generalised
from tpcompile.inspect.explorer.needs import needs_of
from tpcompile.inspect.explorer.proofs import ProofRecorder, Prover
from tpcompile.inspect.instruments import Stats
from tpcompile.ir.info import info_of
from tpcompile.ir.meta import captured_value, made_of, origin_of
from tpcompile.ir.ops import spec_of
from tpcompile.ir.text.printer import section_of

KEPT, REPLACED, FUSED, DROPPED = "kept", "replaced", "fused", "dropped"


class _Snapshot(NamedTuple):
    """A node as it was after a stage."""

    name: str
    general: str
    """The name in templates of lines."""
    layer: int | None
    meanings: tuple[str, ...]
    """The captured value of a call, or the checkpoint tensors of a parameter."""
    users: tuple[fx.Node, ...]


@dataclass
class StageRecorder:
    """An instrument that records each stage as data for the page."""

    prover: Prover
    """The expressions of the graph, which are compared from stage to stage."""
    lines: Lines = field(default_factory=Lines)
    stages: list[dict[str, Any]] = field(default_factory=list)
    _snapshots: list[dict[fx.Node, _Snapshot]] = field(default_factory=list)
    """The nodes of each stage."""
    _bodies: dict[tuple[int, ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._proofs = ProofRecorder(self.prover)

    def __call__(self, name: str, gm: fx.GraphModule, stats: Stats) -> None:
        self._add(name, gm, stats, self._snapshots[-1] if self._snapshots else {})

    def resumed(self, after: int, prover: Prover) -> Callable[[str, fx.GraphModule, Stats], None]:
        """Return an instrument for passes that continue from a copy of a stage's graph."""
        before: dict[fx.Node, _Snapshot] = {}
        self._proofs = ProofRecorder(prover)

        def record(name: str, gm: fx.GraphModule, stats: Stats) -> None:
            nonlocal before
            if before:
                self._add(name, gm, stats, before)
                before = self._snapshots[-1]
            else:  # the copy itself: its nodes have the names of the stage
                self._proofs.changes(gm, _named)
                by_name = {node.name: node for node in gm.graph.nodes}
                users = {
                    snapshot.name: tuple(by_name[reader.name] for reader in snapshot.users)
                    for snapshot in self._snapshots[after].values()
                }
                before = {
                    by_name[snapshot.name]: snapshot._replace(users=users[snapshot.name])
                    for snapshot in self._snapshots[after].values()
                }

        return record

    def _add(
        self, name: str, gm: fx.GraphModule, stats: Stats, before: dict[fx.Node, _Snapshot]
    ) -> None:
        nodes = list(gm.graph.nodes)
        now = {node: _snapshot(node, before.get(node)) for node in nodes}
        self.stages.append(
            {
                "name": name,
                "tp": info_of(gm).tp,
                "ms": round(stats.ms, 3),
                "check_ms": round(stats.check_ms, 3),
                "matches": stats.matches,
                "nodes": len(nodes),
                "nearest": stats.nearest,
                "proof_ms": round(stats.proof_ms, 3),
                "unproved": stats.unproved,
                "changes": self._proofs.changes(gm, _named),
                "sections": self._sections(nodes, info_of(gm).tp),
                "fates": dict(_fates(before, now)),
                "needs": dict(_needs(now)),
            }
        )
        self._snapshots.append(now)

    @property
    def bodies(self) -> list[list[int]]:
        """The line numbers of each distinct section."""
        return [list(body) for body in self._bodies]

    def _sections(self, nodes: Sequence[fx.Node], ranks: int) -> list[list[Any]]:
        """Return the title, the first and last layer, and the body of each section.

        Consecutive layers with the same body are one section.
        """
        sections: list[list[Any]] = []
        for title, layer, run in _runs(nodes):
            numbers = tuple(self.lines.number_of(node, ranks) for node in run)
            body = self._bodies.setdefault(numbers, len(self._bodies))
            last = sections[-1] if sections else None
            if last and layer is not None and last[2] == layer - 1 and last[3] == body:
                last[2] = layer
            else:
                sections.append([title, layer, layer, body])
        return sections


def _runs(nodes: Sequence[fx.Node]) -> Iterator[tuple[str, int | None, list[fx.Node]]]:
    """Split nodes into runs of the same section: the title, the layer and the nodes of each."""
    title, run = "", list[fx.Node]()
    for node in nodes:
        section = section_of(node)
        if section != title and run:
            yield title, _layer(run[0]), run
            run = []
        title = section
        run.append(node)
    if run:
        yield title, _layer(run[0]), run


def _layer(node: fx.Node) -> int | None:
    return None if node.op in ("placeholder", "output") else origin_of(node).layer


def _named(node: fx.Node) -> tuple[str, Callable[[str], str]]:
    layer = _layer(node)
    return general_name(node.name, layer), generalised(layer)


def _snapshot(node: fx.Node, before: _Snapshot | None) -> _Snapshot:
    layer = _layer(node)
    same = before is not None and (before.name, before.layer) == (node.name, layer)
    general = before.general if before and same else general_name(node.name, layer)
    return _Snapshot(node.name, general, layer, _meanings(node), tuple(node.users))


def _meanings(node: fx.Node) -> tuple[str, ...]:
    if node.op == "get_attr":
        return tuple(tensor.name for tensor in made_of(node))
    value = captured_value(node)
    return () if value is None else (f"%{value}",)


def _fates(
    before: dict[fx.Node, _Snapshot], now: dict[fx.Node, _Snapshot]
) -> Iterator[tuple[str, list[str]]]:
    """Yield the fate of each removed node: its name, and its fate with another name.

    Names are those of templates if all layers agree, which the page looks up last. A node that is
    kept is named if the template says something else of other layers.
    """
    heirs = {
        meaning: node
        for node, snapshot in now.items()
        if node not in before
        for meaning in snapshot.meanings
    }
    general: dict[str, list[str]] = {}
    for node, snapshot in before.items():
        if node in now:
            continue
        fate, other = _fate(node, before, now, heirs)
        entry = [fate, _name_beside(now[other], snapshot.layer) if other is not None else ""]
        if general.setdefault(snapshot.general, entry) != entry:
            yield snapshot.name, [fate, other.name if other is not None else ""]
    for node, snapshot in before.items():
        if node in now and snapshot.general in general:
            yield snapshot.name, [KEPT, snapshot.name]
    yield from general.items()


def _name_beside(snapshot: _Snapshot, layer: int | None) -> str:
    """Return the name of a node in the templates of a layer."""
    return snapshot.general if snapshot.layer == layer else general_name(snapshot.name, layer)


def _needs(now: dict[fx.Node, _Snapshot]) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Yield the readers of each collective that need it, under names as those of fates."""
    general: dict[str, list[dict[str, str]]] = {}
    for node, snapshot in now.items():
        spec = spec_of(node)
        if spec is None or spec.across is None:
            continue
        needs, named = needs_of(node), generalised(snapshot.layer, after=True)
        shared = [{**need, "reader": named(f"%{need['reader']}")[1:]} for need in needs]
        if general.setdefault(snapshot.general, shared) != shared:
            yield snapshot.name, needs
    yield from general.items()


def _fate(
    node: fx.Node,
    before: dict[fx.Node, _Snapshot],
    now: dict[fx.Node, _Snapshot],
    heirs: dict[str, fx.Node],
) -> tuple[str, fx.Node | None]:
    """Return whether a node was replaced, fused into a new one, or dropped."""
    heir = _heir(before[node], heirs)
    if heir is not None:
        alone = heir.op != "get_attr" or now[heir].meanings == before[node].meanings
        return REPLACED if alone else FUSED, heir
    for reader in _gone_readers(node, before, now):
        heir = _heir(before[reader], heirs)
        if heir is not None:
            return FUSED, heir
    return DROPPED, None


def _heir(snapshot: _Snapshot, heirs: dict[str, fx.Node]) -> fx.Node | None:
    return next((heirs[meaning] for meaning in snapshot.meanings if meaning in heirs), None)


def _gone_readers(
    node: fx.Node, before: dict[fx.Node, _Snapshot], now: dict[fx.Node, _Snapshot]
) -> Iterator[fx.Node]:
    """Yield the removed readers of a node, and their removed readers, the nearest first."""
    known, waiting = {node}, deque([node])
    while waiting:
        for reader in before[waiting.popleft()].users:
            if reader not in known and reader not in now:
                known.add(reader)
                waiting.append(reader)
                yield reader
