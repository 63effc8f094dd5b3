"""Dependencies are the minimal set that orders all conflicting pairs."""

from __future__ import annotations

from itertools import combinations

import networkx as nx
from hypothesis import given

from tests.vm.programs import MANY, Touch, programs
from tpcompile.vm.program import Join, Program, Region
from tpcompile.vm.proof.conflict import conflict, heads_of
from tpcompile.vm.proof.dependencies import Group, dependencies


def _graph_of(groups: list[tuple[Group, ...]]) -> nx.DiGraph:
    """Return the dependencies with an edge from each instruction to its dependents."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(groups)))
    for number, needed in enumerate(groups):
        graph.add_edges_from((early, number) for group in needed for early in group.members)
    return graph


@MANY
@given(programs())
def test_every_conflicting_pair_is_ordered_and_no_other_edge_is_there(program: Program) -> None:
    graph = _graph_of(dependencies(program.instructions))
    heads = heads_of(program.instructions)
    reached = nx.transitive_closure_dag(graph)
    for early, late in combinations(range(len(program.instructions)), 2):
        if conflict(program, heads, early, late) is not None:
            assert reached.has_edge(early, late)
    for early, late in graph.edges:
        assert early < late and conflict(program, heads, early, late) is not None


def test_all_who_read_one_value_share_a_group() -> None:
    tiles = [Region(0, ((4 * n, 4 * n + 4),)) for n in range(8)]
    whole = Region(0, ((0, 32),))
    layer = [Touch(writes=(tile,)) for tile in tiles] + [Touch(reads=(whole,)) for _ in tiles]
    groups = dependencies(layer * 3)
    writers = tuple(range(16, 24))
    assert all(_members(groups[n]) == [writers] for n in range(24, 32))
    assert len({id(groups[n][0]) for n in range(24, 32)}) == 1
    readers = tuple(range(8, 16))
    assert all(_members(groups[16 + n]) == [readers] for n in range(8)), "no older ones"


HEAD = Region(0, ((0, 8),))


def _block(place: int, region: Region = HEAD, arrivals: int = 2) -> Touch:
    return Touch(joins=(Join(region, (4 * place, 4 * place + 4), 4 * arrivals, arrivals),))


def test_blocks_of_a_head_do_not_wait_for_each_other() -> None:
    reader = Touch(reads=(Region(0, ((2, 3),)),))
    groups = dependencies((Touch(writes=(HEAD,)), _block(0), _block(1), reader, _block(0)))
    assert _members(groups[1]) == _members(groups[2]) == [(0,)]
    assert _members(groups[3]) == [(1, 2)], "a reader waits for all blocks"
    assert _members(groups[4]) == [(1, 2), (3,)], "the next head waits for readers too"


def test_a_complete_head_makes_room_for_the_next() -> None:
    groups = dependencies((_block(0), _block(1), _block(0), _block(1)))
    assert list(map(_members, groups)) == [[], [], [(0, 1)], [(0, 1)]]


def test_a_touch_between_the_blocks_ends_the_head() -> None:
    """A read between two blocks ends the head, so the second block waits for the read."""
    groups = dependencies((_block(0), Touch(reads=(HEAD,)), _block(1)))
    assert list(map(_members, groups)) == [[], [(0,)], [(1,)]]


def test_buffers_that_nobody_writes_order_nothing() -> None:
    weight = Region(0, ((0, 4),))
    assert dependencies([Touch(reads=(weight,))] * 3) == [(), (), ()]


def _members(groups: tuple[Group, ...]) -> list[tuple[int, ...]]:
    return [group.members for group in groups]
